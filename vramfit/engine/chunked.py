"""The optimizer all of ours are: one weight after another, in fp32 temporaries of a bounded size.

What an optimizer computes is a `Rule`. This file brings it what it works on a chunk at a time, so that the step's
temporary does not grow with the largest matrix: weights that are bf16 come as fp32 and go back rounded by chance,
states that are kept in 8 or 4 bits come as fp32 and go back rounded to their levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor, nn

from vramfit.engine.low_bit import LowBit
from vramfit.engine.stochastic_rounding import RoundingNoise, round_stochastically

SMALL: Final = 4096
"""Weights of fewer numbers than this, and all vectors, keep 32-bit states."""

CHUNK_ON_CPU: Final = 2**17
CHUNK_ON_CARD: Final = 2**21
"""Numbers of a weight in work at once: what a core's cache holds, and what keeps a card busy for longer than it takes
to start an operation. Both are multiples of every block."""

_CODES, _SCALES, _STEP = "codes", "scales", "step"


@dataclass(frozen=True)
class StateSpec:
    """A state with a number for every number of the weight. `signed`: it has both signs."""

    name: str
    signed: bool


class Rule(Protocol):
    """What an optimizer computes for one weight. `states` are those that may be kept in few bits. `by_number`: it looks
    at each number of a weight alone, whatever the weight's shape."""

    @property
    def by_number(self) -> bool: ...

    @property
    def states(self) -> tuple[StateSpec, ...]: ...

    def step(self, weight: Weight, group: Mapping[str, Any]) -> None: ...


class Weight:
    """One weight, its gradient and states during its step. `count` is the number of this step, from 1.

    `shape` is the weight's; chunks are of the flattened weight.
    """

    def __init__(
        self,
        parameter: Tensor,
        gradient: Tensor,
        *,
        state: MutableMapping[str, Any],
        formats: Mapping[str, LowBit],
        generator: torch.Generator | None,
        chunk_numbers: int,
    ) -> None:
        self._flat, self._gradient = parameter.view(-1), gradient.view(-1)
        self.shape, self.state = parameter.shape, state
        self.count = int(state[_STEP].item())
        self._formats, self._generator = formats, generator
        self.chunk_numbers = chunk_numbers

    @property
    def device(self) -> torch.device:
        return self._flat.device

    def chunks(self) -> Iterator[slice]:
        """The whole weight in order; every chunk but the last begins and ends with a block."""
        numbers = self._flat.numel()
        for start in range(0, numbers, self.chunk_numbers):
            yield slice(start, min(numbers, start + self.chunk_numbers))

    def gradient(self, part: slice) -> Tensor:
        """fp32; not to be changed."""
        return self._gradient[part].float()

    def weights(self, part: slice) -> Tensor:
        """fp32, for changing and `keep_weights`."""
        return self._flat[part].float()

    def keep_weights(self, part: slice, values: Tensor) -> None:
        """Make the changed `values` that `weights` gave the weight's own."""
        if self._generator is not None:
            self._flat[part] = round_stochastically(values, self._generator)

    def read(self, name: str, part: slice) -> Tensor:
        """A state in fp32, for changing and `keep`."""
        if name not in self._formats:
            whole: Tensor = self.state[name]
            return whole.view(-1)[part]
        return self._formats[name].read(*self._stored(name), part.start, part.stop)

    def keep(self, name: str, part: slice, values: Tensor) -> None:
        """Make the changed `values` that `read` gave the state's own. They are of no use afterwards."""
        if name in self._formats:
            self._formats[name].write(values, *self._stored(name), part.start)

    def _stored(self, name: str) -> tuple[Tensor, Tensor]:
        return self.state[f"{name}_{_CODES}"], self.state[f"{name}_{_SCALES}"]


class ChunkedOptimizer(torch.optim.Optimizer):
    """Steps every weight that has a gradient by its group's rule (`group["rule"]`, a name in `rules`).

    `bits` is what states are kept in, where the weight is a matrix of at least `SMALL` numbers. Weights are fp32 or
    bf16; bf16 ones are rounded by chance, from `seed`. `chunk_numbers` bounds the temporaries, 0: as suits the device.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        rules: Mapping[str, Rule],
        bits: Literal[32, 8, 4] = 32,
        seed: int = 0,
        chunk_numbers: int = 0,
        **defaults: Any,
    ) -> None:
        self._rules, self._bits, self.chunk_numbers = dict(rules), bits, chunk_numbers
        self._noise = RoundingNoise(seed)
        self._formats: dict[tuple[torch.device, bool], LowBit] = {}
        super().__init__(list(groups), {"lr": 0.0, "rule": next(iter(rules)), **defaults})
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        self._places = {parameter: place for place, parameter in enumerate(held)}

    @property
    def kind(self) -> str:
        """What decides the form of the states, in words: "adamw in 8 bits"."""
        return f"{'+'.join(sorted(self._rules))} in {self._bits} bits"

    def goes_by_number(self, group: Mapping[str, Any]) -> bool:
        """Whether a group's weights may be stepped in stretches: each number by its own gradient and states alone."""
        return self._bits == 32 and self._rules[group["rule"]].by_number

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of every weight that has a gradient."""
        if closure is not None:
            raise NotImplementedError("gradients are made before the step, not by it")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        rule, state = self._rules[group["rule"]], self.state[parameter]
        if not state:
            state.update(self._first_state(parameter, rule))
        state[_STEP] += 1
        # Chunks are stretches of memory: what lies in memory in another order is stepped in a copy. Detached, not
        # `.data`: who watches for changes (recovery) must see them.
        lies_flat = parameter.is_contiguous()
        values = parameter.detach() if lies_flat else parameter.detach().contiguous()
        weight = Weight(
            values,
            parameter.grad.contiguous() if parameter.grad is not None else values,
            state=state,
            formats=self._formats_of(parameter, rule),
            generator=self._generator(parameter, int(state[_STEP].item())),
            chunk_numbers=self.chunk_numbers or (CHUNK_ON_CPU if parameter.device.type == "cpu" else CHUNK_ON_CARD),
        )
        rule.step(weight, group)
        if not lies_flat:
            parameter.copy_(values)

    def _first_state(self, parameter: nn.Parameter, rule: Rule) -> dict[str, Tensor]:
        state = {_STEP: torch.zeros((), dtype=torch.float32)}  # on the CPU: reading it must not wait for the device
        formats = self._formats_of(parameter, rule)
        for spec in rule.states:
            if spec.name in formats:
                codes, scales = formats[spec.name].zeros(parameter.numel(), device=parameter.device)
                state |= {f"{spec.name}_{_CODES}": codes, f"{spec.name}_{_SCALES}": scales}
            else:
                state[spec.name] = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        return state

    def formats_by_state(self, parameter: nn.Parameter) -> Mapping[str, LowBit]:
        """Which states of a weight are kept in few bits, and how."""
        rules = [group["rule"] for group in self.param_groups for each in group["params"] if each is parameter]
        return self._formats_of(parameter, self._rules[rules[0] if rules else next(iter(self._rules))])

    def _formats_of(self, parameter: nn.Parameter, rule: Rule) -> dict[str, LowBit]:
        if self._bits == 32 or parameter.ndim < 2 or parameter.numel() < SMALL:
            return {}
        return {spec.name: self._format(parameter.device, signed=spec.signed) for spec in rule.states}

    def _format(self, device: torch.device, *, signed: bool) -> LowBit:
        if (device, signed) not in self._formats and self._bits != 32:
            self._formats[device, signed] = LowBit.on(device, self._bits, signed=signed)
        return self._formats[device, signed]

    def _generator(self, parameter: nn.Parameter, step: int) -> torch.Generator | None:
        if parameter.dtype == torch.float32:
            return None
        return self._noise.generator(parameter.device, weight=self._places[parameter], step=step)
