"""What is said of plans and of how runs ended: sentences that carry their name and their numbers, for any language."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Value = str | int | tuple[str, ...]
"""What stands in a sentence. Strings that are sentences themselves are told in the same language; a tuple lists what a
version lacks."""

JOINED: Final = "joined"
"""The key of several sentences, one after the other; `parts` are they."""
ENDED: Final = "ended"
"""The key of a text that gets a full stop; `said` is it."""
STOPS: Final = (".", "!", "?", "。", "！", "？")


class Sentence(str):
    """English text that knows which of ENGLISH it is (`key`) and what was put into it (`values`)."""

    key: str
    values: Mapping[str, Value]

    def __new__(cls, text: str, key: str = "", values: Mapping[str, Value] | None = None) -> Sentence:
        made = super().__new__(cls, text)
        made.key, made.values = key, values or {}
        return made


def say(key: str, **values: Value) -> Sentence:
    """The sentence called `key` with its values."""
    shown = {name: ", ".join(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return Sentence(ENGLISH[key].format(**shown), key, values)


def joined(*parts: str) -> Sentence:
    """Sentences one after the other; those that say nothing are left out."""
    there = tuple(part for part in parts if part)
    return Sentence(" ".join(there), JOINED, {"parts": there})


def ended(text: str) -> str:
    """The text with a full stop, unless it has one."""
    return text if text.endswith(STOPS) else Sentence(f"{text}.", ENDED, {"said": text})


def packed(text: str) -> Any:
    """A text as JSON values, with what any language needs to say it."""
    if not isinstance(text, Sentence):
        return text
    values = {
        name: [packed(each) for each in value] if isinstance(value, tuple) else packed(value)  # type: ignore[arg-type]
        for name, value in text.values.items()
    }
    return {"text": str(text), "key": text.key, "values": values}


def unpacked(found: Any) -> str:
    """A text from what `packed` made of it. Raises KeyError and TypeError for anything else."""
    if not isinstance(found, Mapping):
        return str(found)
    return Sentence(found["text"], found["key"], {name: _value(value) for name, value in found["values"].items()})


def _value(found: Any) -> Value:
    if isinstance(found, list):
        return tuple(unpacked(each) for each in found)
    return found if isinstance(found, int) else unpacked(found)


ENGLISH: Final[Mapping[str, str]] = {
    "you": "You set it",
    "model.counted": "VRAMFit does not know the family '{family}': its {count} parameters were counted, and its blocks "
    "are taken for a Llama's of the same widths",
    "model.whole": "transformers has no class for the decoder alone: {count} parameters of its other parts are loaded "
    "and counted, too",
    "budget.free": "{free} of {place} are free, less {reserve} kept in reserve for everything else that runs",
    "budget.short": "You asked for {wish}, but only {free}",
    "budget.card": "{name}'s memory",
    "precision.slow": "You set it; without 16-bit units a CPU is about 18 times slower in it",
    "precision.cpu": "CPUs without 16-bit units are many times slower in bf16",
    "precision.bf16": "The card computes in bf16, twice as fast as fp32 and without loss scaling",
    "precision.fp16": "The card has no bf16, so fp16 with loss scaling is used",
    "precision.fp32": "The device computes in fp32 only",
    "hardware.no_device": "This machine has no device '{name}', it has: {there}",
    "hardware.choose_device": "Choose one of those, or auto.",
    "hardware.no_card": "The catalogue of {count} cards has no '{name}'",
    "hardware.choose_card": "Choose one of: {names}.",
    "hardware.not_measured": "Measuring this machine did not come to an end: {why}",
    "hardware.no_reason": "no reason was given",
    "hardware.measure_again": "Rates of the catalogue are used until it does; python -m vramfit calibrate tries again.",
    "idle": "no effect",
    "idle.adapter": "The method {method} trains no adapter",
    "idle.revision": "The starter has no revisions",
    "idle.epochs": "{steps} steps were asked for, which decide instead",
    "idle.beta": "The optimizer {optimizer} does not use it",
    "idle.final_rate": "A constant learning rate stays where it is",
    "idle.bad_rows": "The run stops at the first row that cannot be read",
    "idle.prompts": "Samples of 0 tokens are not written",
    "idle.calibrate": "The run computes in fp32: there is no drift from it",
    "idle.drift_limit": "The run is not compared with fp32",
    "length.tokens": "{count} tokens",
    "length.beyond": "You set it, beyond the {positions} positions the model was made for: expect poor text there",
    "length.longest": "The longest sequence has {count} tokens",
    "length.positions": "The model has no more positions",
    "length.cut": "Longer sequences are cut: {count} tokens keep the memory of a step small",
    "batch.fewer": "You set it to {wish}, and a step has {sequences} sequences",
    "batch.set": "You set the micro-batch to {size}; {times} of them make a step of {sequences}",
    "batch.all": "All {sequences} sequences of a step fit at once, which is fastest",
    "batch.parts": "{size} at a time, {times} times, make a step of {sequences} sequences: more at a time would not "
    "fit, or be less than 2 % faster",
    "batch.cut": "{reason}. They are all of the data, fewer than the {wish} that a step was to have",
    "trains.blocks": "the last {count} of {layers} blocks",
    "trains.head": "You set it: they train with the final norm and the head; what comes before them is frozen and has "
    "no backward",
    "trains.tied": "You set it: they train with the final norm. The head is the embedding's own table, which lies "
    "before the frozen blocks: it is frozen with them, or backward would have to pass them all",
    "activations.keep": "keep",
    "activations.compress": "keep in 8 bits",
    "activations.recompute": "recompute {count} of {layers} blocks",
    "activations.fit": "All activations fit, and keeping them is fastest",
    "activations.none": "Activations of all blocks do not fit, so each block is computed again in backward: a third "
    "more work",
    "activations.some": "Activations of {count} blocks fit; the others are computed again",
    "loss.full": "{family} changes its logits after the head, so its own forward makes them: {size}",
    "loss.one": "All logits of a micro-batch are one small chunk, whose gradient is taken at once",
    "loss.chunks": "At most {rows} rows of logits are there at once, instead of {size} for all",
    "weights.nf4": "The frozen base is stored in 4 bits, adapters are trained in fp32",
    "weights.int8": "You set it: the frozen base is stored in 8 bits, adapters are trained in fp32",
    "weights.fp32": "Trained weights stay in fp32: in 16 bits most small updates would be rounded away",
    "weights.frozen16": "The frozen base is stored as it is computed with, adapters are trained in fp32",
    "weights.frozen": "The frozen base is stored as it is computed with",
    "weights.copies": "Computed with in bf16; an fp32 copy beside the optimizer's states is what is trained",
    "weights.bf16": "You set it: rounded stochastically, so that small updates are not lost on average",
    "optimizer.quarter": "States in blocks with a scale each take a quarter of the memory",
    "optimizer.eighth": "States in blocks with a scale each take an eighth of the memory",
    "optimizer.paged": "You set it: the driver moves states to RAM when the card runs short",
    "compile.no_graphs": "You set it; graphs are recorded on NVIDIA and AMD cards alone, of weights that stay in place",
    "optimizer.backward": "You set it: each gradient is used up as soon as it is there, so they never all exist",
    "optimizer.backward.one": "in backward, one pass",
    "optimizer.backward.two": "in backward, the gradient's norm is found in a pass before it",
    "optimizer.place": "States live in {place}, and the step is done by the CPU",
    "place.host": "RAM",
    "place.disk": "a file",
    "cards.fsdp": "Weights, gradients and states are split, and each block is gathered when it is needed",
    "cards.ddp": "Each card holds everything and takes its part of the step; gradients are summed",
    "streaming": "They live in {place} and visit the device one by one; the others stay",
    "streaming.blocks": "{count} of {layers} blocks",
    "split": "A block has about {size}, so its experts come some at a time; what is around them is computed once more",
    "split.slices": "in {count} parts of {size}",
    "streaming.stay": "All blocks stay on the device; what is stepped and its states are in {place}",
    "disk.value": "{size} a step",
    "disk.wear": "A consumer drive of 4 TB is rated for 2,400 TB written: that is {steps} such steps",
    "saves.aside": "while training goes on",
    "saves.wait": "training waits",
    "saves.copy": "They are written from a copy of {size} in RAM",
    "saves.no_room": "A copy of {size} beside the run does not fit in RAM, so a step waits until one is written",
    "saves.tier": "What trains is written from where it lives, one tensor at a time",
    "inputs.host": "What a block is given waits in RAM for its backward, and comes back ahead of it",
    "inputs.disk": "What blocks are given in a step is more than {place} has room for: it is written behind the "
    "computation, and read back ahead of its backward",
    "wont.device": "{model} with {method} needs {needed} at its peak ({phase}), and {available} of {device} are "
    "available",
    "wont.ram": "{model} with {method} needs {needed} of RAM beside the card, and this machine has {there}, {free} of "
    "it free",
    "wont.disk": "{what} of {model} with {method} need {needed} of disk, and {free} are free",
    "wont.disk.states": "Blocks and optimizer states that live on disk, checkpoints and result",
    "wont.disk.blocks": "Blocks that live on disk in the format they train beside, checkpoints and result",
    "wont.disk.result": "Checkpoints and result",
    "wont.disk.inputs": "{others} (with what blocks are given in a step)",
    "help.others": "Other programs hold {held} of {place}: without them it would fit.",
    "help.beside": "{name} ({device}) has {free} free, enough for it.",
    "help.change": "{change} would need {needs}.",
    "help.needs": "{device} and {ram} of RAM ({way})",
    "help.more_ram": "With {needed} of RAM, of which this machine has {there}, it would fit ({way}).",
    "help.device": "A device with {needed} free would do.",
    "help.device.ram": "A device with {needed} free would do, and {ram} of RAM.",
    "help.device.disk": "A device with {needed} free would do, and {disk} of free disk.",
    "help.device.ram.disk": "A device with {needed} free would do, {ram} of RAM and {disk} of free disk.",
    "help.host": "A machine with {needed} of RAM free would do.",
    "help.host.disk": "A machine with {needed} of RAM free would do, and {disk} of free disk.",
    "help.card": "The smallest card that would do is {name} ({size}), with {needs}.",
    "help.designed": "Another way ({way}) would need {device} of the device and {ram} of RAM ({needs}: not in this "
    "version).",
    "help.smaller": "Choose a smaller model, or add RAM.",
    "help.space": "Free some space, or choose a data folder on another disk.",
    "change.auto": "Leaving {setting} to auto",
    "change.lora": "LoRA instead of full fine-tuning",
    "change.qlora": "QLoRA (a 4-bit base)",
    "change.length": "Sequences of at most {count} tokens",
    "change.qlora.length": "QLoRA with sequences of at most {count} tokens",
    "change.length.auto": "Sequences of at most {count} tokens with every memory setting left to auto",
    "change.qlora.length.auto": "QLoRA with sequences of at most {count} tokens and every memory setting left to auto",
    "change.keep_every": "Keeping no checkpoints for good (output.keep_every 0)",
    "change.keep_one": "Keeping 1 checkpoint (output.keep_checkpoints)",
    "change.keep_newest": "Keeping only the newest checkpoint (output.keep_checkpoints, keep_every, keep_best)",
    "change.adapter": "Exporting the adapter alone (output.export)",
    "other.device": "It needs {needed} on the device at its peak ({phase}), and {available} are available",
    "other.ram": "It needs {needed} of RAM, and there are {available}",
    "other.disk": "It needs {needed} of disk, and {available} are free",
    "other.fits": "It would fit in {size}",
    "other.lacks": "This version cannot run it: it needs {needs}",
    "other.memory": "It is as fast, and needs more memory",
    "other.slower": "It fits, and a step takes {share} longer",
    "assumed.keys": "config.json does not say {keys}: taken as transformers does",
    "assumed.ours": "config.json does not say {keys}: assumed",
    "assumed.method": "No method was named: LoRA is taken (--method)",
    "assumed.data": "No data was named: {sequences} sequences, all as long as allowed, are assumed",
    "assumed.ram": "{ram} of RAM and {disk} of free disk are assumed",
    "assumed.disk": "{disk} of free disk are assumed",
    "assumed.card": "The catalogue has no facts about {name}: it is taken for a small card ({flops} TFLOP/s in "
    "{format}, {bandwidth} GB/s) until it is measured (calibrate)",
    "assumed.cpu": "The CPU's speed is assumed from {cores} core(s) with {vectors} at {clock} GHz, until it is "
    "measured (calibrate)",
    "gone.folder": "The folder of run {job}, {folder}, is gone, and with it its checkpoints up to step {step}",
    "gone.checkpoints": "Run {job} had a checkpoint of step {step}, and none is left in {folder}",
    "death.boot": "The machine was started again while it trained.",
    "death.memory": "The machine ran out of memory (RAM) and the system ended the trainer (SIGKILL).",
    "death.silent": "The trainer ended without a word; why is not known, as the supervisor that started it was gone.",
    "death.unseen": "Its trainer ended without a word, and no supervisor was there to see it.",
    "death.code": "The trainer ended with exit code {code} before it could say how the run went.",
    "death.crash": "The trainer crashed ({signal}).",
    "death.outside": "The trainer was ended from outside ({signal}).",
    "death.never": "Its trainer never began.",
    "death.late": "It did not end within {seconds} s of Stop and was ended; steps since the last checkpoint are lost.",
    "death.foreground": "The process that ran it ended without a word.",
    "death.foreground.boot": "The process that ran it ended without a word; the machine was started again since.",
    "death.keyboard": "The run was interrupted from the keyboard.",
    "death.system": "The system asked the trainer to end; it saved its work at step {step}.",
    "stays.parked": "The supervisor of the queue died {times} times over this run, so it is parked and starts again "
    "only when you resume it.",
    "stays.no_step": "It does not go on by itself, because no step was done.",
    "stays.no_further": "It does not go on by itself, because the start before had come to step {step} too.",
    "stays.once": "It went on by itself once, which is the most that was set (automatic resumes), so it waits for you.",
    "stays.often": "It went on by itself {times} times, which is the most that was set (automatic resumes), so it "
    "waits for you.",
    "start.failed": "The trainer could not be started: {reason}.",
    "start.room": "{size} of its disk are free, and {needed} have to be",
    "queue.waits": "The queue waits, because no trainer can be started now: {reason}.",
    "queue.tries": "It is tried again by itself, and at once when you let the queue go on.",
    "failed.memory": "The machine ran out of memory: {reason}",
    "failed.memory.device": "The device ran out of memory: {reason}",
    "failed.memory.none": "no more could be had",
    "failed.card": "The card was lost while it trained: {reason}",
    "failed.full": "The disk is full: {reason}",
    "failed.folder": "The run's folder takes no writes ({reason})",
    "failed.disk": "The disk did not do what was asked of it ({reason})",
    "failed.files": "No further file could be opened ({reason})",
    "failed.unexpected": "Unexpected error ({reason})",
    "save.full": "The disk filled up while a checkpoint of {size} was written to {folder}",
    "save.quota": "The disk filled up (the quota is used up) while a checkpoint of {size} was written to {folder}",
    "save.no_room": "A checkpoint needs {needed} of disk, {folder} has {free} free",
    "save.refused": "A checkpoint could not be written to {folder}: {reason}",
    "export.full": "The disk filled up while the result of {size} was written to {folder}",
    "export.no_room": "The result needs {needed} of disk, {folder} has {free} free",
    "export.refused": "The result could not be written to {folder}: {reason}",
    "health.spike": "The loss jumped to {loss}; the median of the {steps} steps before is {usual}, a usual deviation "
    "{spread}.",
    "health.slow": "Speed fell to {speed} tokens/s from the usual {usual}: another program, heat, or memory that is "
    "short may be the cause.",
    "health.hot": "The card is too hot and has lowered its clocks: the run is slower until it cools. Give it air, or a "
    "lower power limit.",
    "health.hot.at": "The card is too hot at {degrees} °C and has lowered its clocks: the run is slower until it "
    "cools. Give it air, or a lower power limit.",
    "health.spill": "The run holds {held}, and {used} are in use on a card of {size}: the rest lies in RAM, which "
    "makes steps many times slower. Lower the memory budget, or end other programs that use the card.",
    "health.drift": "{format} strays from fp32: the loss by {loss}, the gradient norm by {norm}; the limit is {limit}.",
    "health.refused": "{problem} ({rows}).",
    "health.refused.loss": "The loss is not a finite number, so the step was refused",
    "health.refused.scale": "fp16's loss scale has fallen to {scale}, below {least}: the gradients stay infinite",
    "health.refused.gradient": "The gradient is not finite, so the step was refused",
    "health.ends.one": "A step gave no finite result: {problem} (last with {rows})",
    "health.ends": "{count} steps in a row up to step {step} gave no finite result: {problem} (last with {rows})",
    "health.rate": "Lower the learning rate, or choose fp32 or bf16, and look at these rows; the last good checkpoint "
    "is kept.",
    "health.format": "Choose bf16 or fp32, and look at these rows; the last good checkpoint is kept.",
    "rows.one": "row {names} of the data",
    "rows.some": "rows {names} of the data",
    "rows.more": "rows {names} and {more} more of the data",
    "cure.memory": "Close other programs, or set a smaller micro-batch or maximum length.",
    "cure.smaller": "Set a smaller micro-batch or maximum length, or recompute activations; then start or resume it.",
    "cure.card": "Look at the card with its driver's tool, restart the machine if it is not shown there, and resume.",
    "cure.room": "Free some room.",
    "cure.room.run": "Free some room and resume the run; checkpoints saved so far are kept.",
    "cure.files": "Raise the limit of open files (ulimit -n), or close other programs.",
    "cure.files.run": "Raise the limit of open files (ulimit -n), or close other programs, then resume the run; "
    "checkpoints saved so far are kept.",
    "cure.programs": "Close other programs.",
    "cure.readonly": "Check the drive (the system makes one with errors read-only) and mount it for writing.",
    "cure.readonly.run": "Check the drive (the system makes one with errors read-only) and mount it for writing, then "
    "resume the run; checkpoints saved so far are kept.",
    "cure.rights": "Give the folder back its right to be written to.",
    "cure.rights.run": "Give the folder back its right to be written to, then resume the run; checkpoints saved so far "
    "are kept.",
    "cure.drive.run": "Check the drive, then resume the run; checkpoints saved so far are kept.",
    "cure.folder.run": "Check that the folder can be written to, then resume the run; checkpoints saved so far are "
    "kept.",
    "cure.checkpoints": "Put the checkpoints back and resume, or duplicate the run to start it anew.",
    "next.log": "The log has the details.",
    "next.resume": "Resume goes on from the last checkpoint.",
    "next.there": "Resume goes on from there.",
    "next.resume.log": "Resume goes on from the last checkpoint; the log has the details.",
    "next.again.log": "Start it again; the log has the details.",
}

PHASES: Final[Mapping[str, str]] = {
    "load": "loading",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "block": "{phase} of block {number}",
    "embedding": "backward of the embedding",
    "step": "optimizer step",
    "evaluation": "evaluation",
    "save": "saving a checkpoint",
    "calibration": "comparison with fp32",
}
"""Phases of a step, by the planner's names; `block` is the phase of one block."""

WAYS: Final[Mapping[str, str]] = {
    "on the device": "on the card",
    "on the device.cpu": "in RAM",
    "8-bit optimizer": "8-bit optimizer",
    "block inputs in RAM": "block inputs in RAM",
    "optimizer in RAM": "optimizer in RAM",
    "shared by the cards (DDP)": "shared by the cards (DDP)",
    "split among the cards (FSDP)": "split among the cards (FSDP)",
    "streaming from RAM": "streaming from RAM",
    "streaming from disk": "streaming from disk",
}
"""Ways to run a model, by the planner's names."""
