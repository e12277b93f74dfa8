"""From a RunConfig's choice of model to a module on the device, ready to train.

`transformers` does the loading: safetensors only, never a model's own code, and a local folder never touches the
network. What is imported here is imported when needed: a first run waits for it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from vramfit.config import STARTER_MODEL, ModelChoice, RunConfig
from vramfit.engine.last_blocks import train_last_blocks
from vramfit.engine.nf4 import BLOCK
from vramfit.engine.packed import PackedLinear
from vramfit.engine.precision import DTYPES
from vramfit.errors import ModelError
from vramfit.models.architecture import Architecture, is_quantised
from vramfit.models.attention import implementation
from vramfit.models.catalogue import architecture_in, architecture_of, may_be_hub_id
from vramfit.models.files import check_folder, read_config, weight_files
from vramfit.models.hub_commit import hub_commit
from vramfit.models.tokenizer import cannot_load, load_options, local_folder
from vramfit.planning.plan import Plan
from vramfit.planning.stored import QUANTISED

_ENDS: Final = 2**20
"""Bytes at each end of a file by which it is told from another."""


def load_model(
    config: RunConfig, plan: Plan, *, cache: Path, start_file: Path | None = None, resumed: bool = False
) -> nn.Module:
    """The model of `config` on `plan.device`, in `plan.weight_format`, with adapters attached when the method has them.

    Random weights and adapters come from `config.seed`. A start of the adapters that changes the base is written to
    `start_file`, and read from it where a run is `resumed`. Raises ModelError naming the file or setting at fault.
    """
    quiet_transformers()
    torch.manual_seed(config.seed)
    if config.model.source == STARTER_MODEL:
        return _weights_in(build_starter(implementation(plan)), _weight_dtype(plan)).to(plan.device)
    if config.method == "pretrain":
        return _untrained(config.model, plan, seed=config.seed).to(plan.device)
    if plan.weight_format in QUANTISED:
        return adapted(_quantised(config, plan), config, start_file, resumed=resumed)
    model = _trained(config.model, plan)
    if not config.trains_adapter:
        train_last_blocks(model, plan.last_blocks)
        return model.to(plan.device)
    return adapted(model.to(plan.device), config, start_file, resumed=resumed)


def _quantised(config: RunConfig, plan: Plan) -> nn.Module:
    """A frozen base in few bits: as its files have it, or packed on the way in."""
    from vramfit.models.quantised import is_stored_quantised, load_quantised

    if not is_stored_quantised(config.model):
        return load_quantised(config, plan)
    if plan.weight_format != "nf4":
        raise ModelError(
            f"{config.model.source} is stored in 4 bits, and cannot be had in {plan.weight_format}",
            "Set the base's weights to auto, or choose the original 16-bit model.",
        )
    return _trained(config.model, plan)


def adapted(model: nn.Module, config: RunConfig, start_file: Path | None, *, resumed: bool) -> nn.Module:
    from vramfit.models.adapter_files import check_writable
    from vramfit.models.adapter_start import start_adapters
    from vramfit.models.adapters import attach_adapters
    from vramfit.models.export import export_kind

    adapted = attach_adapters(
        model,
        rank=config.adapter.rank,
        alpha=config.lora_alpha,
        dropout=config.adapter.dropout,
        targets=config.adapter.targets,
        variant=config.adapter.variant,
        experts=config.adapter.experts,
        seed=config.seed,
    )
    if export_kind(config) == "adapter":
        check_writable(adapted)
    start_adapters(adapted, config.adapter.start, seed=config.seed, file=start_file, again=resumed)
    return adapted


def check_weights(config: RunConfig) -> None:
    """What can be said of a folder's weights without reading them: whole, and such that the method can train them.

    Raises ModelError. The starter, a model from the hub and a run from random weights have none to check.
    """
    folder = local_folder(config.model)
    if config.model.source == STARTER_MODEL or config.method == "pretrain" or folder is None:
        return
    values = check_folder(folder)
    stored = values.get("quantization_config")
    if isinstance(stored, dict) and stored.get("load_in_8bit"):
        raise ModelError(
            f"{folder} is stored in 8 bits, which VRAMFit does not train on",
            "Choose the original 16-bit model; the method qlora stores it in 4 bits itself.",
        )
    if is_quantised(values) and config.method != "qlora":
        raise ModelError(
            f"{folder} is stored quantised, and {config.method!r} needs the weights as numbers",
            "Choose the original 16-bit model, or the method qlora.",
        )


def weights_fingerprint(config: RunConfig) -> str:
    """What tells a base from another of the same shape: size, beginning (with all names) and end of each of its files;
    of a model of the hub the commit that is in this machine's cache.

    "" where a checkpoint has all weights.
    """
    if config.trains_all or config.model.source == STARTER_MODEL:
        return ""
    folder = local_folder(config.model)
    if folder is None:
        return hub_commit(config.model)
    found = hashlib.sha256()
    for path in weight_files(folder):
        with path.open("rb") as file:
            found.update(f"{path.name} {path.stat().st_size}".encode())
            found.update(file.read(_ENDS))
            file.seek(max(0, path.stat().st_size - _ENDS))
            found.update(file.read(_ENDS))
    return found.hexdigest()[:16]


def build_starter(attention: str = "sdpa") -> nn.Module:
    """The starter with random weights (seed torch before), fp32 on the CPU."""
    # Straight from the family's own module: the automatic classes look through every family there is.
    from transformers.models.llama import LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(starter_shape(attention))
    return model


def starter_shape(attention: str = "sdpa") -> Any:
    from transformers.models.llama import LlamaConfig

    from vramfit.starter.shape import MODEL_CONFIG

    return LlamaConfig.from_dict(MODEL_CONFIG, attn_implementation=attention)


def starter_sources(seed: int) -> dict[str, InMemory]:
    """The starter's random weights, of which there are few, made whole: as a run on the device has them."""
    torch.manual_seed(seed)
    return {name: InMemory(tensor=each.detach()) for name, each in build_starter().named_parameters()}


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """A parameter's numbers that are there already."""

    tensor: torch.Tensor

    def read_into(self, into: torch.Tensor) -> int:
        """Fill a CPU tensor of the same shape, converted to its format. Returns the bytes read."""
        into.copy_(self.tensor)
        return self.tensor.nbytes


def _weights_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with its parameters in `dtype`; not its buffers: positions' frequencies are of no use in 16 bits."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def read_architecture(model: ModelChoice) -> Architecture:
    """The shape of `model`: starter, folder or catalogue without the network, else the hub's config.json.

    Raises ModelError.
    """
    try:
        return architecture_of(model)
    except ModelError:
        if local_folder(model) is not None or not may_be_hub_id(model.source):
            raise
    from transformers import AutoConfig

    try:
        values = AutoConfig.from_pretrained(model.source, **load_options(model, None)).to_dict()
    except Exception as error:
        raise cannot_load(model, None, error, part="config.json") from error
    return architecture_in(values, model.source)


def _untrained(model: ModelChoice, plan: Plan, *, seed: int) -> nn.Module:
    """A model of the chosen shape with random weights, which are those of a streamed run."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from vramfit.models.random_start import make_start

    attention = implementation(plan)
    shape = untrained_shape(model)
    try:
        with no_init_weights():  # they are made below
            built: Any = AutoModelForCausalLM.from_config(
                shape, dtype=_weight_dtype(plan), attn_implementation=attention, trust_remote_code=False
            )
        built.tie_weights()
    except Exception as error:
        raise cannot_load(model, local_folder(model), error, part="config.json") from error
    make_start(built, seed)
    return built  # type: ignore[no-any-return]


def untrained_shape(model: ModelChoice) -> Any:
    """The config.json of `model` as `transformers` reads it; no weights are asked for. Raises ModelError."""
    from transformers import AutoConfig

    folder = local_folder(model)
    if folder is not None:
        read_config(folder)
    try:
        return AutoConfig.from_pretrained(folder or model.source, **load_options(model, folder))
    except Exception as error:
        raise cannot_load(model, folder, error, part="config.json") from error


def _trained(model: ModelChoice, plan: Plan) -> nn.Module:
    """A model with its weights as its files have them, in few bits where those do."""
    from transformers import AutoModelForCausalLM

    folder = local_folder(model)
    if folder is not None:
        check_folder(folder)
    options: dict[str, Any] = {
        "dtype": _weight_dtype(plan),
        "use_safetensors": True,
        "attn_implementation": implementation(plan),
        "output_loading_info": True,
        **load_options(model, folder),
    }
    packed = plan.weight_format in QUANTISED
    if packed:
        from vramfit.models.adapters import quiet_bitsandbytes

        quiet_bitsandbytes()
    if plan.device != "cpu" or packed:
        options["device_map"] = {"": plan.device}  # straight to the card, without a whole copy in RAM
    try:
        loaded, report = AutoModelForCausalLM.from_pretrained(folder or model.source, **options)
    except Exception as error:
        raise cannot_load(model, folder, error, part="weights") from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers only warns, and fills them with random numbers
        raise ModelError(
            f"{len(missing)} tensors are missing from the weights of {model.source}, the first is {missing[0]}",
            "Download the model again, completely.",
        )
    trained: nn.Module = loaded
    if packed:
        _keep_trainable(trained, _weight_dtype(plan))
        if plan.device == "cpu":
            _compute_rightly(trained, _weight_dtype(plan))
    return own_weights(trained)


def own_weights(model: nn.Module) -> nn.Module:
    """The model with its weights in memory of its own, at addresses the CPU's matrix products like.

    Weights loaded to the CPU are windows onto the file as it lies on the disk: whoever changes the file changes the
    run, and where a tensor begins is up to the length of the file's header. Products whose operands begin elsewhere
    than at a vector's boundary are slower, and some libraries then add in another order: the bits would depend on it.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and not tensor.untyped_storage().resizable():  # memory that is not torch's
            tensor.data = tensor.data.clone(memory_format=torch.preserve_format)
    return model


def _keep_trainable(model: nn.Module, dtype: torch.dtype) -> None:
    """Compute in `dtype`, whatever the files say. On CPUs with bf16 units bitsandbytes repacks a 4-bit weight when it
    is evaluated, for good, into a layout whose product has no gradient: what is trained after the first one would
    be something else."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "compute_dtype", dtype)  # noqa: B010
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 - a plain attribute, unknown to nn.Module


def _compute_rightly(model: nn.Module, dtype: torch.dtype) -> None:
    """On the CPU bitsandbytes 0.50 takes wrong scales where a row is no whole number of blocks: such linears keep their
    4 bits and are computed by ours."""
    for name, module in list(model.named_modules()):
        if getattr(getattr(module, "weight", None), "quant_state", None) is None:
            continue
        linear: Any = module
        if linear.in_features % BLOCK:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, PackedLinear.of_library(linear, dtype))


def _weight_dtype(plan: Plan) -> torch.dtype:
    """The format of weights that are not quantised; beside an nf4 base, that is what is computed in."""
    return DTYPES[plan.compute if plan.weight_format in QUANTISED else plan.weight_format]


def quiet_transformers() -> None:
    """A run's log is no place for a progress bar that redraws itself."""
    from transformers.utils import logging

    logging.disable_progress_bar()
