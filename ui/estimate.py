"""Forecast -> HTML: the stacked bar of memory against the budget, and what the run takes. Pure functions."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ui.form import field_of
from ui.texts import Texts
from vramfit.errors import Problem, VramfitError, WontFit
from vramfit.planning.abilities import untraced
from vramfit.planning.cost import cost_of_run
from vramfit.planning.plan import MEMORY_KINDS, Alternative, Forecast, MemoryEstimate, Plan
from vramfit.planning.reasons import ASSUMED
from vramfit.units import format_bytes, format_count, format_duration, format_usd

MIN_SHARE: Final = 0.0005
"""A part smaller than this share of the bar gets no segment (it stays in the legend)."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One part of the bar: `left` and `width` as shares of the whole bar, `size` in bytes."""

    kind: str
    size: int
    left: float
    width: float


def segments(parts: Mapping[str, int], *, scale_bytes: int) -> list[Segment]:
    """The parts laid end to end in stacking order, as shares of `scale_bytes` (the bar's full width)."""
    laid, left = [], 0.0
    for kind in MEMORY_KINDS:
        width = parts.get(kind, 0) / scale_bytes
        laid.append(Segment(kind=kind, size=parts.get(kind, 0), left=left, width=width))
        left += width
    return laid


def peak_parts(memory: MemoryEstimate) -> dict[str, int]:
    """The peak phase by kind; what driver and allocator take besides is overhead, so it sums to the figure."""
    parts: dict[str, int] = {str(kind): size for kind, size in memory.peak.parts.items()}
    parts["overhead"] = parts.get("overhead", 0) + max(0, memory.device_bytes - memory.peak_bytes)
    return parts


def forecast_card(
    forecast: Forecast,
    texts: Texts,
    *,
    device_name: str,
    off: str = "",
    refusal: WontFit | None = None,
    check: str = "",
) -> str:
    """The whole estimate of a plan. With a `refusal` it does not fit: what takes the room, and what would help. `off`
    says why it cannot be started here. `check` is the token by which the plan can be checked precisely (ui/checks.py),
    "" where it cannot."""
    memory, plan = forecast.memory, forecast.plan
    fits = forecast.fits and refusal is None  # it may fit the device, and not the RAM beside it or the disk
    key = "fits" if fits else "wontfit"
    used, budget = memory.device_bytes, plan.budget_bytes
    elsewhere = refusal is not None and refusal.tier != "device"
    if refusal is not None and elsewhere:
        used, budget = refusal.needed_bytes, refusal.available_bytes
    sentence = f"estimate.over.{refusal.tier}" if refusal is not None and elsewhere else "estimate.over"
    figure = texts["estimate.of_budget" if fits else sentence].format(
        used=format_bytes(used), budget=format_bytes(budget)
    )
    on_cpu = plan.device == "cpu"
    body = [
        _head(texts, key, on=device_name),
        f'<div class="vf-figure"><b>{_esc(figure)}</b></div>',
        _bar(memory, plan.budget_bytes, texts),
        f'<div class="vf-sub">{_esc(texts["estimate.device.cpu" if on_cpu else "estimate.device"])}. '
        f"{_esc(texts['estimate.phase'].format(phase=texts.phase(memory.peak.name)))}.</div>",
        _legend(memory, texts),
    ]
    if refusal is not None:
        others = _alternatives(forecast, texts)
        suggestions = _list([texts.said(each) for each in refusal.suggestions])
        refused = [_sentence(texts.said(refusal.what)), suggestions, _assumed(forecast, texts), others]
        return _card([*body, *refused], state=key)
    body += [_facts(forecast, texts), _assumed(forecast, texts)]
    if off:
        body.append(f'<p class="vf-note">{_esc(off)}</p>')
    body += [
        _reasons(forecast, texts),
        _speed(forecast, texts),
        _phases(forecast, texts),
        _alternatives(forecast, texts),
        _check(check, plan, texts),
    ]
    return _card(body, state=key)


def error_card(error: VramfitError, texts: Texts) -> str:
    """Why there is no plan; where it is for want of room, what takes the room and each thing that would help."""
    if isinstance(error, WontFit) and error.forecast is not None:
        return forecast_card(error.forecast, texts, device_name="", refusal=error)
    title = texts["estimate.unavailable"]
    said = [_sentence(texts.said(error.what)), _sentence(texts.said(error.remedy))]
    return _card([_head(texts, "open", title=title), *said], state="open")


def later_card(sentence: str, texts: Texts, *, device_name: str, ask_again: int | None = None) -> str:
    """No estimate yet, and why (`sentence`: its key in the texts). With a number the page asks again by itself; the
    number must be another one each time, because an answer that is the same changes nothing in the page."""
    mark = "" if ask_again is None else f'<i hidden data-again="{ask_again}"></i>'
    return _card([_head(texts, "later", on=device_name), _sentence(texts[sentence]), mark], state="open")


def problems_card(problems: Sequence[Problem], texts: Texts) -> str:
    """The list of fields that need attention. Each carries its path, so that the page can repeat it at the field."""
    items = "".join(
        f'<li class="vf-problem-item" data-field="{_esc(field_of(problem.field))}">{_esc(str(problem))}</li>'
        for problem in problems
    )
    head = _head(texts, "open", title=texts["estimate.problems"])
    return _card([head, f'<ul class="vf-problems">{items}</ul>'], state="open")


def notice_card(error: VramfitError, texts: Texts) -> str:
    """What went wrong when a button was pressed: one card, two sentences."""
    title = f'<div class="vf-notice-title">{_esc(texts["error.title"])}</div>'
    said = _sentence(texts.said(error.what)) + _sentence(texts.said(error.remedy))
    return f'<div class="vf-notice" role="alert">{title}{said}</div>'


def _card(body: Sequence[str], *, state: str) -> str:
    return f'<div class="vf-estimate" data-state="{state}">{"".join(body)}</div>'


def _head(texts: Texts, state: str, *, title: str = "", on: str = "") -> str:
    where = f'<span class="vf-on">{_esc(texts["estimate.on"].format(name=on))}</span>' if on else ""
    badge = f'<span class="vf-badge vf-badge-{state}">{_esc(texts["estimate." + state])}</span>'
    return f'<div class="vf-head"><h3>{_esc(title or texts["estimate.title"])}</h3>{where}{badge}</div>'


def _bar(memory: MemoryEstimate, budget_bytes: int, texts: Texts) -> str:
    """The peak phase, stacked. Full width is the budget, or what is needed when that is more."""
    scale = max(budget_bytes, memory.device_bytes, memory.peak_bytes, 1)
    drawn = "".join(
        f'<span class="vf-part vf-part-{part.kind}" style="left:{part.left:.3%};width:{part.width:.3%}" '
        f'title="{_esc(texts["part." + part.kind])}: {format_bytes(part.size)}"></span>'
        for part in segments(peak_parts(memory), scale_bytes=scale)
        if part.width >= MIN_SHARE
    )
    mark = f'<i class="vf-budget" style="left:{budget_bytes / scale:.3%}"></i>' if scale > budget_bytes else ""
    label = texts["estimate.of_budget"].format(
        used=format_bytes(memory.device_bytes), budget=format_bytes(budget_bytes)
    )
    return f'<div class="vf-bar" role="img" aria-label="{_esc(label)}">{drawn}{mark}</div>'


def _legend(memory: MemoryEstimate, texts: Texts) -> str:
    parts = peak_parts(memory)
    rows = "".join(
        f'<li><i class="vf-dot vf-part-{kind}"></i>{_esc(texts["part." + kind])}<b>{format_bytes(parts[kind])}</b></li>'
        for kind in MEMORY_KINDS
        if parts.get(kind, 0) > 0
    )
    return f'<ul class="vf-legend">{rows}</ul>'


def _facts(forecast: Forecast, texts: Texts) -> str:
    speed = texts["estimate.tokens_per_s"].format(value=format_count(forecast.speed.tokens_per_s))
    facts = (
        ("time", format_duration(forecast.seconds)),
        ("speed", speed),
        ("steps", f"{forecast.steps:,}"),
        ("host", format_bytes(forecast.memory.host_bytes)),
        ("disk", format_bytes(forecast.memory.disk_bytes)),
    )
    memory = forecast.memory
    written = texts["estimate.written"].format(
        step=format_bytes(memory.written_per_step_bytes),
        checkpoint=format_bytes(memory.written_per_checkpoint_bytes),
        count=forecast.checkpoints,
        all=format_bytes(forecast.written_bytes),
    )
    cells = "".join(f"<div><dt>{_esc(texts['estimate.' + key])}</dt><dd>{_esc(text)}</dd></div>" for key, text in facts)
    return f'<dl class="vf-facts">{cells}</dl><div class="vf-sub vf-written">{_esc(written)}</div>'


def _assumed(forecast: Forecast, texts: Texts) -> str:
    """What nobody said, so that it was assumed: in sight, because the answer changes with it."""
    notes = [texts.said(choice.reason).rstrip(".") for choice in forecast.plan.reasons if choice.setting == ASSUMED]
    if not notes:
        return ""
    items = "".join(f"<li>{_esc(note)}</li>" for note in notes)
    return f'<div class="vf-sub vf-assumed">{_esc(texts["estimate.assumed"])}<ul>{items}</ul></div>'


def _reasons(forecast: Forecast, texts: Texts) -> str:
    rows = "".join(
        f"<tr><th>{_esc(_setting(choice.setting, texts))}</th><td><b>{_esc(texts.said(choice.value))}</b>"
        f"{_you(texts) if choice.fixed else ''}<span>{_esc(texts.said(choice.reason))}</span></td></tr>"
        for choice in forecast.plan.reasons
        if choice.setting != ASSUMED
    )
    notes = [texts[f"estimate.rates.{forecast.speed.rate_source}"]]
    notes += [] if forecast.workload.exact else [texts["estimate.guess"]]
    low, high = format_bytes(forecast.memory.low_bytes), format_bytes(forecast.memory.high_bytes)
    notes.append(texts["estimate.range"].format(low=low, high=high))
    return (
        f'<details class="vf-fold"><summary>{_esc(texts["estimate.reasons"])}</summary>'
        f'<table class="vf-reasons">{rows}</table><p class="vf-sub">{_esc(" ".join(notes))}</p></details>'
    )


def _speed(forecast: Forecast, texts: Texts) -> str:
    """A step's seconds by what takes them, and what follows for the run."""
    speed = forecast.speed
    shown = [(name, seconds) for name, seconds in speed.bounds.items() if seconds >= MIN_SHARE * speed.step_seconds]
    left, drawn, legend = 0.0, "", ""
    for name, seconds in shown:
        width, word = seconds / speed.step_seconds, _esc(texts[f"bound.{name}"])
        drawn += (
            f'<span class="vf-part vf-bound-{name}" style="left:{left:.3%};width:{width:.3%}" '
            f'title="{word}: {_seconds(seconds)} s"></span>'
        )
        legend += f'<li><i class="vf-dot vf-bound-{name}"></i>{word}<b>{_seconds(seconds)} s</b></li>'
        left += width
    label = _esc(texts["speed.bar"].format(seconds=_seconds(speed.step_seconds)))
    bar = f'<div class="vf-bar" role="img" aria-label="{label}">{drawn}</div><ul class="vf-legend">{legend}</ul>'
    rows = "".join(
        f"<tr><th>{_esc(texts[f'speed.{key}'])}</th><td><b>{_esc(text)}</b></td></tr>"
        for key, text in _speed_facts(forecast, texts)
    )
    return (
        f'<details class="vf-fold vf-speed-fold"><summary>{_esc(texts["estimate.speed"])}</summary>'
        f'<div class="vf-sub">{label}</div>{bar if shown else ""}<table class="vf-reasons">{rows}</table></details>'
    )


def _seconds(value: float) -> str:
    """Short enough for the legend on a phone."""
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _speed_facts(forecast: Forecast, texts: Texts) -> Iterator[tuple[str, str]]:
    """Rates; energy and money where the card's watts and prices are known."""
    speed, costs = forecast.speed, cost_of_run(forecast)
    yield "steps", f"{speed.steps_per_s:.3g}"
    yield "mfu", f"{speed.mfu:.0%}"
    if costs is None:
        return
    yield "kwh", f"{costs.kwh:.3g} kWh"
    price = f"${costs.setup.electricity_usd:g}"
    yield "electricity", texts["speed.at.kwh"].format(usd=format_usd(costs.electricity_usd), price=price)
    if costs.rented_usd is not None:
        price = f"${costs.setup.rent_usd:g}"
        yield "rented", texts["speed.at.hour"].format(usd=format_usd(costs.rented_usd), price=price)


def _phases(forecast: Forecast, texts: Texts) -> str:
    """Every phase with what it takes of the device; where that is RAM, a checkpoint's copy lies there, too."""
    memory = forecast.memory
    copy = memory.save_copy_bytes if memory.saves_aside and forecast.plan.device == "cpu" else 0
    rows = "".join(
        f"<tr><th>{_esc(texts.phase(phase.name))}</th>"
        f"<td><b>{format_bytes(phase.total_bytes + (copy if phase.name == 'save' else 0))}</b></td></tr>"
        for phase in memory.phases
    )
    title = _esc(texts["estimate.phases"])
    return f'<details class="vf-fold"><summary>{title}</summary><table class="vf-reasons">{rows}</table></details>'


def _alternatives(forecast: Forecast, texts: Texts) -> str:
    """The other ways to do the run, each with why it was not taken and what this version lacks for it."""
    rows = "".join(
        f"<tr><th>{_esc(texts.words.get(f'way.{other.name}', other.name))}</th><td>"
        f"<b>{_esc(_reach(other, texts))}</b><span>{_esc(texts.said(other.reason))}{texts['list.stop']}"
        f"{_lacks(other, texts)}</span></td></tr>"
        for other in forecast.alternatives
    )
    if not rows:
        return ""
    title = _esc(texts["estimate.others"])
    return f'<details class="vf-fold"><summary>{title}</summary><table class="vf-reasons">{rows}</table></details>'


def _reach(other: Alternative, texts: Texts) -> str:
    if not other.fits:
        return texts["estimate.wontfit"]
    speed = texts["estimate.tokens_per_s"].format(value=format_count(other.tokens_per_s))
    return f"{format_bytes(other.device_bytes)}, {speed}"


def _lacks(other: Alternative, texts: Texts) -> str:
    return " " + _esc(texts["estimate.needs"].format(what=texts.lacks(other.needs))) if other.needs else ""


def _check(token: str, plan: Plan, texts: Texts) -> str:
    """The button of the precise check; for a plan that no trace follows a sentence why there is none."""
    if not token:
        reason = untraced(plan)
        said = texts[f"check.none.{reason.replace(' ', '_')}"] if reason else ""
        return f'<p class="vf-sub">{_esc(said)}</p>' if said else ""
    return (
        f'<div class="vf-check" data-token="{_esc(token)}"><button type="button" class="vf-button vf-button-small" '
        f'data-check>{_esc(texts["check.button"])}</button><span class="vf-sub">{_esc(texts["check.help"])}</span>'
        '<div class="vf-check-view"></div></div>'
    )


def _setting(name: str, texts: Texts) -> str:
    """The form's label of a plan's setting where it has one: `memory.loss`, `loss` and "max length" have."""
    key = name.replace(" ", "_").replace("-", "_")
    for path, (label, _) in texts.fields.items():
        if key in (path, path.rpartition(".")[2]):
            return label
    return texts.words.get(f"plan.{key}", name.replace("_", " ").capitalize())


def _you(texts: Texts) -> str:
    return f' <em class="vf-you">{_esc(texts["estimate.you"])}</em>'


def _sentence(text: str) -> str:
    if not text:
        return ""
    end = "" if text.endswith((".", "!", "?", "。", "…")) else "."
    return f"<p>{_esc(text)}{end}</p>"


def _list(sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{_esc(text)}</li>" for text in sentences)
    return f'<ul class="vf-suggestions">{items}</ul>' if items else ""


def _esc(text: object) -> str:
    return html.escape(str(text), quote=True)
