"""The Explore page: what a card could train, one model on all cards, memory against length, and what it would cost.

The page is drawn once; each part is worked out when assets/explore.js asks for it, in a thread of its own and one at a
time, so that the form's estimate never waits for more than one plan. Pure arithmetic of the planner, shown as HTML.
"""

from __future__ import annotations

import dataclasses
import html
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from ui.estimate import notice_card
from ui.preview import PLAN_PREFIX, Previewer
from ui.texts import Texts
from vramfit.config import Method, ModelChoice, RunConfig
from vramfit.errors import ConfigError, Problem, UserError, VramfitError
from vramfit.hardware import catalogue as cards
from vramfit.hardware.devices import Machine
from vramfit.models import catalogue as models
from vramfit.models.architecture import Architecture
from vramfit.planning.cost import (
    COMPARED,
    ELECTRICITY_USD,
    OWN_NOTE,
    SETUP_RAM_GIB,
    Comparison,
    Cost,
    Setup,
    compare,
    cost,
)
from vramfit.planning.explore import (
    METHODS,
    Outcome,
    across_cards,
    across_programs,
    heat_map,
    over_lengths,
    shared_outcome,
)
from vramfit.planning.other_programs import Elsewhere
from vramfit.planning.plan import Workload
from vramfit.planning.presets import LADDER
from vramfit.planning.search import Search
from vramfit.units import GIB, format_bytes, format_count, format_duration, format_usd

KEPT: Final = 64
FIRST_MODEL: Final = "Qwen/Qwen3-8B"
MILLION_TOKENS: Final = 100.0
WHOLE: Final = ("count", "length")
"""Numbers of which there are no parts."""
MOST: Final = {"count": 64, "ram": 1 << 20, "length": 1 << 22}


@dataclass(frozen=True, kw_only=True)
class Look:
    """What the page asks about: a card (`auto`, or `plan:NAME` as in the form) and how many of it, GiB of RAM (None: as
    it is, or what is assumed), tokens of a sequence, and the model and method of the parts that are about one."""

    card: str
    count: int
    ram_gib: float | None
    length: int
    model: str
    method: Method

    @classmethod
    def of(cls, query: Mapping[str, str], texts: Texts) -> Look:
        """From the address. Raises ConfigError with every number that is none."""
        problems: list[Problem] = []
        count = _number(query, "count", 1, texts, problems)
        ram = _number(query, "ram", 0, texts, problems)
        length = _number(query, "length", 2048, texts, problems)
        method = query.get("method") or "lora"
        if method not in METHODS:
            what = texts["explore.wrong.method"].format(text=method[:40])
            remedy = texts["explore.wrong.method.remedy"].format(known=", ".join(METHODS))
            problems.append(Problem(field="method", what=what, remedy=remedy))
        if problems:
            raise ConfigError(problems)
        return cls(
            card=query.get("card", "auto"),
            count=int(count),
            ram_gib=ram or None,
            length=int(length),
            model=query.get("model") or FIRST_MODEL,
            method=cast(Method, method),
        )


def _number(query: Mapping[str, str], name: str, usual: float, texts: Texts, problems: list[Problem]) -> float:
    text = query.get(name, "").strip().replace(",", "")
    least, most = (0 if usual == 0 else 1), MOST.get(name, 1e18)
    try:
        value = float(text) if text else float(usual)
    except ValueError:
        value = -1.0
    if not least <= value <= most or (name in WHOLE and not value.is_integer()):
        what = texts["explore.wrong"].format(label=texts[f"explore.{name}"], text=text[:40])
        remedy = texts["explore.wrong.whole" if name in WHOLE else "explore.wrong.remedy"].format(
            least=least, most=f"{most:,.0f}"
        )
        problems.append(Problem(field=name, what=what, remedy=remedy))
    return value


class Explorer:
    """Answers what the page asks. Thread-safe; works on one question at a time and keeps the last KEPT answers."""

    def __init__(self, previewer: Previewer) -> None:
        self._previewer = previewer
        self._turn = threading.Lock()
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._parts: dict[str, Callable[[Mapping[str, str], Texts], dict[str, Any]]] = {
            "map": self._map,
            "cards": self._cards,
            "lengths": self._lengths,
            "programs": self._programs,
            "cost": self._cost,
        }

    def view(self, part: str, query: Mapping[str, str], texts: Texts) -> dict[str, Any]:
        """One part of the page: `html`, and for the curve a `figure`. What is wrong with a wish is told there, too."""
        if part not in self._parts:
            raise UserError(f"The Explore page has no part {part[:40]!r}", "Reload the page.")
        try:
            return self._parts[part](query, texts)
        except VramfitError as error:
            return {"html": notice_card(error, texts), "failed": True}

    def machine(self, look: Look) -> Machine:
        """The machine a look is about. Raises HardwareError."""
        if look.card.startswith(PLAN_PREFIX):
            return cards.machine_with(look.card.removeprefix(PLAN_PREFIX), count=look.count, ram_gib=look.ram_gib)
        machine = self._previewer.machine()
        if look.ram_gib is None:
            return machine
        ram = int(look.ram_gib * GIB)
        return dataclasses.replace(machine, ram_bytes=ram, ram_free_bytes=int(ram * 0.9))

    def _kept_or(self, key: Sequence[object], make: Callable[[], Any]) -> Any:
        name = repr(key)
        with self._turn:
            if name not in self._kept:
                self._kept[name] = make()
            self._kept.move_to_end(name)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return self._kept[name]

    def _map(self, query: Mapping[str, str], texts: Texts) -> dict[str, Any]:
        look = Look.of(query, texts)
        machine = self.machine(look)
        names = list(dict.fromkeys((*LADDER, look.model)))
        shown = sorted((_model(name, texts) for name in names), key=lambda model: model.params)
        found = self._kept_or(
            ("map", machine, look.length, names), lambda: heat_map(machine, shown, length=look.length)
        )
        return {"html": map_table(found, look, texts)}

    def _cards(self, query: Mapping[str, str], texts: Texts) -> dict[str, Any]:
        look = Look.of(query, texts)
        model = _model(look.model, texts)
        key = ("cards", model, look.method, look.length, look.ram_gib)
        found = self._kept_or(key, lambda: across_cards(model, look.method, length=look.length, ram_gib=look.ram_gib))
        return {"html": cards_table(found, texts)}

    def _lengths(self, query: Mapping[str, str], texts: Texts) -> dict[str, Any]:
        look = Look.of(query, texts)
        machine, model = self.machine(look), _model(look.model, texts)
        found = self._kept_or(
            ("lengths", machine, model, look.method), lambda: over_lengths(machine, model, look.method)
        )
        return {"html": "", "figure": length_figure(found, budget_bytes=budget_of(machine), texts=texts)}

    def _programs(self, query: Mapping[str, str], texts: Texts) -> dict[str, Any]:
        look = Look.of(query, texts)
        machine, model = self.machine(look), _model(look.model, texts)
        found = self._kept_or(
            ("programs", machine, model, look.method, look.length),
            lambda: across_programs(machine, model, look.method, length=look.length),
        )
        return {"html": programs_table(found, texts)}

    def _cost(self, query: Mapping[str, str], texts: Texts) -> dict[str, Any]:
        look = Look.of(query, texts)
        model = _model(look.model, texts)
        problems: list[Problem] = []
        tokens = _number(query, "tokens", MILLION_TOKENS, texts, problems) * 1e6
        setups = [_setup(query, side, texts, problems) for side in ("a", "b")]
        if problems:
            raise ConfigError(problems)
        costs, notes, usual = [], [], {}
        for side, (card, setup) in zip(("a", "b"), setups, strict=True):
            usual[side] = {"price": card.price_usd, "rent": card.rent_usd, "watts": card.power_watts}
            found = self._kept_or(
                ("cost", card.name, setup.cards, model, look.method, look.length),
                lambda card=card, setup=setup: shared_outcome(
                    cards.machine_with(card, count=setup.cards, ram_gib=SETUP_RAM_GIB),
                    model,
                    look.method,
                    length=look.length,
                ),
            )
            if found.verdict == "no":
                what = texts["explore.cost.no"].format(setup=setup.name, model=model.name, limit=_limit(found, texts))
                raise UserError(what, texts["explore.cost.no.remedy"])
            costs.append(cost(setup, tokens=tokens, tokens_per_s=found.tokens_per_s))
            notes.append(_needs(found, texts))
        return {"html": cost_table(compare(costs[0], costs[1]), notes, texts), "usual": usual}


def budget_of(machine: Machine) -> int:
    """What the planner lets a run have of the machine's first device, in bytes. Asked of a small run."""
    small = models.find(LADDER[0])
    if small is None:
        raise AssertionError(f"the catalogue lacks {LADDER[0]}")
    work = Workload(sequences=1, mean_tokens=64, longest_tokens=64)
    config = RunConfig.parse({"method": "lora", "model": {"source": small.name}})
    return Search.of(config, small, machine, work).start.plan.budget_bytes


def _model(name: str, texts: Texts) -> Architecture:
    return models.architecture_of(ModelChoice(source=name))


def _setup(query: Mapping[str, str], side: str, texts: Texts, problems: list[Problem]) -> tuple[cards.Card, Setup]:
    name, count = COMPARED[("a", "b").index(side)]
    card = cards.get(query.get(f"{side}_card") or name)
    changes: dict[str, float] = {}
    for field, key in (("price_usd", "price"), ("rent_usd", "rent"), ("power_watts", "watts")):
        text = query.get(f"{side}_{key}", "")
        if text.strip():
            changes[field] = _number({key: text}, key, 0, texts, problems)
    if query.get("electricity", "").strip():
        changes["electricity_usd"] = _number(query, "electricity", 0, texts, problems)
    number = _number({"count": query.get(f"{side}_count", "")}, "count", count, texts, problems)
    return card, Setup.of(card, max(1, int(number)), **{key: max(0.0, value) for key, value in changes.items()})


# ---- the page -----------------------------------------------------------------------------------------------------


def page_html(previewer: Previewer, texts: Texts) -> str:
    """The page with its controls, its parts still empty."""
    devices = previewer.machine().devices
    here = [("auto", texts["new.card.here"].format(name=devices[0].name))]
    plans = [(PLAN_PREFIX + card.name, card.name) for card in cards.cards()]
    first = _control(texts, "card", _select("card", [*here, *plans], "auto"))
    numbers = "".join(
        _control(texts, name, _input(name, value, hint))
        for name, value, hint in (("count", "1", ""), ("ram", "", texts["explore.ram.auto"]), ("length", "2048", ""))
    )
    calibrate = (
        f'<div class="vf-calibrate"><button type="button" class="vf-button" data-calibrate>'
        f"{_esc(texts['calibrate.button'])}</button><span class='vf-sub'>{_esc(texts['calibrate.help'])}</span>"
        '<div class="vf-calibrate-view"></div></div>'
    )
    return (
        f'<div class="vf-explore"><div class="vf-lead"><h1>{_esc(texts["explore.title"])}</h1>'
        f"<p>{_esc(texts['explore.lead'])}</p></div>"
        f'<div class="vf-controls">{first}{numbers}</div>{calibrate}'
        + _part("map", texts, after='<p class="vf-sub vf-said"></p>')
        + '<div class="vf-controls vf-controls-model">'
        + _control(texts, "model", _model_input())
        + _control(texts, "method", _select("method", [(m, texts.value("method", m)) for m in METHODS], "lora"))
        + "</div>"
        + f'<div class="vf-two">{_part("lengths", texts)}{_part("cards", texts)}</div>'
        + _part("programs", texts)
        + _part("cost", texts, before=_cost_controls(texts))
        + "</div>"
    )


def _part(name: str, texts: Texts, *, before: str = "", after: str = "") -> str:
    title = _esc(texts[f"explore.{name}.title"])
    return (
        f'<section class="vf-chart vf-part-box" data-part="{name}"><header><h4>{title}</h4>'
        f'<b></b></header>{before}<div class="vf-part-body"></div>{after}</section>'
    )


def _cost_controls(texts: Texts) -> str:
    sides = ""
    for side, (name, count) in zip(("a", "b"), COMPARED, strict=True):
        chosen = _select(f"{side}_card", [(card.name, card.name) for card in cards.cards()], name)
        fields = _control(texts, "card", chosen) + _control(texts, "count", _input(f"{side}_count", str(count)))
        fields += "".join(_control(texts, key, _input(f"{side}_{key}", "")) for key in ("price", "rent", "watts"))
        sides += f'<div class="vf-setup">{fields}</div>'
    both = _control(texts, "tokens", _input("tokens", f"{MILLION_TOKENS:g}"))
    both += _control(texts, "electricity", _input("electricity", "", f"{ELECTRICITY_USD:g}"))
    return f'{sides}<div class="vf-setup">{both}</div>'


def _control(texts: Texts, name: str, control: str) -> str:
    return f"<label><span>{_esc(texts[f'explore.{name}'])}</span>{control}</label>"


def _input(name: str, value: str, hint: str = "") -> str:
    return (
        f'<input name="{name}" value="{_esc(value)}" placeholder="{_esc(hint)}" inputmode="decimal" autocomplete="off">'
    )


def _model_input() -> str:
    names = "".join(f'<option value="{_esc(name)}"></option>' for name in models.known())
    return (
        f'<input name="model" value="{FIRST_MODEL}" list="vf-models" autocomplete="off">'
        f'<datalist id="vf-models">{names}</datalist>'
    )


def _select(name: str, choices: Sequence[tuple[str, str]], value: str) -> str:
    options = "".join(
        f'<option value="{_esc(key)}"{" selected" if key == value else ""}>{_esc(label)}</option>'
        for key, label in choices
    )
    return f'<select name="{name}">{options}</select>'


# ---- its parts ----------------------------------------------------------------------------------------------------


def map_table(found: Sequence[Outcome], look: Look, texts: Texts) -> str:
    """Models down, methods across. A cell says tokens/s and bytes, or what it would take; the whole of it on hover."""
    rows: dict[str, list[Outcome]] = {}
    for one in found:
        rows.setdefault(one.model, []).append(one)
    head = "".join(f"<th>{_esc(texts[f'method.{method}'])}</th>" for method in METHODS)
    body = "".join(
        f'<tr><th title="{_esc(name)}">{_esc(name.rpartition("/")[2])}</th>'
        f"{''.join(_cell(one, look, texts) for one in outcomes)}</tr>"
        for name, outcomes in rows.items()
    )
    legend = "".join(
        f'<span><i class="vf-dot vf-cell-{key}"></i>{_esc(texts[f"explore.{key}"])}</span>'
        for key in ("fits", "streams", "later", "no")
    )
    table = f'<table class="vf-heat"><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="vf-scroll">{table}</div><div class="vf-sub vf-keys">{legend}</div>'


def _cell(one: Outcome, look: Look, texts: Texts) -> str:
    chosen = " data-chosen" if (one.model, one.method) == (look.model, look.method) else ""
    return (
        f'<td class="vf-cell-{_shade(one)}"{chosen}><button type="button" title="{_esc(told(one, texts))}" '
        f'data-model="{_esc(one.model)}" data-method="{one.method}"><b>{_esc(_speed(one, texts))}</b>'
        f"<span>{_esc(_short(one, texts))}</span></button></td>"
    )


def _shade(one: Outcome) -> str:
    return "later" if one.needs and one.verdict != "no" else one.verdict


def _speed(one: Outcome, texts: Texts) -> str:
    if one.verdict == "no":
        return texts["explore.no"]
    return texts["estimate.tokens_per_s"].format(value=_rate(one.tokens_per_s))


def _rate(value: float) -> str:
    return format_count(value) if value >= 10 else f"{value:.2g}"


def _short(one: Outcome, texts: Texts) -> str:
    if one.verdict == "no":
        return _limit(one, texts)
    return format_bytes(one.device_bytes) if one.verdict == "fits" else _way(one, texts)


def told(one: Outcome, texts: Texts) -> str:
    """One outcome in a sentence or two."""
    subject = f"{one.model.rpartition('/')[2]}, {texts[f'method.{one.method}']}, {one.length:,}: "
    if one.verdict == "no":
        return f"{subject}{texts['explore.no']} ({_limit(one, texts)}). {_least(one, texts)}".strip()
    sizes = texts[_where("explore.sizes", one)].format(
        way=_way(one, texts), device=format_bytes(one.device_bytes), host=format_bytes(one.host_bytes)
    )
    more = "" if one.verdict == "fits" else f"{_needs(one, texts)} {_least(one, texts)}"
    return f"{subject}{_speed(one, texts)}, {sizes} {more}".strip()


def _least(one: Outcome, texts: Texts) -> str:
    return texts[_where("explore.least", one)].format(size=format_bytes(one.least_bytes)) if one.least_bytes else ""


def _needs(one: Outcome, texts: Texts) -> str:
    return texts["estimate.needs"].format(what=texts.lacks(one.needs)) if one.needs else ""


def _limit(one: Outcome, texts: Texts) -> str:
    return texts.words.get(f"limit.{one.limit}", one.limit)


def _way(one: Outcome, texts: Texts) -> str:
    name = _where(f"way.{one.way}", one)
    return texts.words.get(name, texts.words.get(f"way.{one.way}", one.way))


def _where(key: str, one: Outcome) -> str:
    """A CPU has no card memory: its texts say RAM."""
    return f"{key}.cpu" if one.on_cpu else key


def cards_table(found: Sequence[Outcome], texts: Texts) -> str:
    """A model on every card of the catalogue, each with a bar as long as its speed."""
    most = max((one.tokens_per_s for one in found), default=0.0) or 1.0
    rows = "".join(
        f'<tr title="{_esc(told(one, texts))}"><th>{_esc(one.card)}</th>'
        f'<td><i class="vf-speed vf-cell-{_shade(one)}" style="width:{100 * one.tokens_per_s / most:.1f}%"></i>'
        f"<b>{_esc(_speed(one, texts))}</b><span>{_esc(_short(one, texts))}</span></td></tr>"
        for one in found
    )
    return f'<div class="vf-scroll"><table class="vf-cards">{rows}</table></div>'


def programs_table(found: Sequence[Elsewhere], texts: Texts) -> str:
    """The same run in every program, ours first: its speed, and what it needs of the card."""
    most = max((one.speed.tokens_per_s for one in found if one.fits), default=0.0) or 1.0
    rows = "".join(_program_row(one, most, texts, ours=at == 0) for at, one in enumerate(found))
    note = f"<p class='vf-sub'>{_esc(texts['explore.programs.note'])}</p>"
    return f'<div class="vf-scroll"><table class="vf-cards">{rows}</table></div>{note}'


def _program_row(one: Elsewhere, most: float, texts: Texts, *, ours: bool) -> str:
    plan, needed = one.plan, format_bytes(one.memory.device_bytes)
    way = texts["explore.programs.way"].format(size=plan.micro_batch, times=plan.accumulation)
    if one.fits:
        speed = texts["estimate.tokens_per_s"].format(value=_rate(one.speed.tokens_per_s))
        told, share = f"{needed} · {way}", one.speed.tokens_per_s / most
    else:
        over = texts["explore.programs.over"].format(needed=needed, budget=format_bytes(plan.budget_bytes))
        told = over if one.memory.device_bytes > plan.budget_bytes else texts["limit.RAM"]
        speed, share = texts["explore.no"], 0.0
    shade = "fits" if one.fits else "no"
    name = texts["explore.programs.ours"] if ours else one.program
    return (
        f"<tr{' data-ours' if ours else ''}><th>{_esc(name)}</th>"
        f'<td><i class="vf-speed vf-cell-{shade}" style="width:{100 * share:.1f}%"></i>'
        f"<b>{_esc(speed)}</b><span>{_esc(told)}</span></td></tr>"
    )


def length_figure(found: Sequence[Outcome], *, budget_bytes: int, texts: Texts) -> dict[str, Any]:
    """Memory against tokens of a sequence: the fastest plan that fits, the least that this version needs."""
    planned = [one for one in found if one.verdict != "no"]
    least = [one for one in found if one.least_bytes]
    lines = [
        {
            "name": texts[f"explore.{key}"],
            "colour": key,
            "x": [one.length for one in group],
            "y": [size / GIB for size in sizes],
            "text": [told(one, texts) for one in group],
        }
        for key, group, sizes in (
            ("planned", planned, [one.device_bytes for one in planned]),
            ("smallest", least, [one.least_bytes for one in least]),
        )
        if group
    ]
    return {
        "lines": lines,
        "budget": budget_bytes / GIB,
        "budget_name": texts["chart.memory.budget"],
        "x": texts["explore.length"],
        "lengths": [one.length for one in found],
    }


def cost_table(compared: Comparison, notes: Sequence[str], texts: Texts) -> str:
    """Two setups side by side, and the first as a share of the second."""
    first, second = compared.first, compared.second
    head = "".join(f"<th>{_esc(one.setup.name)}</th>" for one in (first, second))
    lines = (
        ("speed", [_tokens_per_s(one, texts) for one in (first, second)], first.tokens_per_s / second.tokens_per_s),
        ("hours", [format_duration(one.hours * 3600) for one in (first, second)], compared.hours),
        ("kwh", [f"{one.kwh:,.1f} kWh" for one in (first, second)], compared.kwh),
        ("paid", [_usd(one.electricity_usd) for one in (first, second)], _ratio(first, second, "electricity_usd")),
        ("wear", [_usd(one.wear_usd) for one in (first, second)], _ratio(first, second, "wear_usd")),
        ("own", [_usd(one.own_usd) for one in (first, second)], _ratio(first, second, "own_usd")),
        ("rented", [_usd(one.rented_usd) for one in (first, second)], compared.rented_usd),
        ("bought", [_usd(one.setup.bought_usd) for one in (first, second)], _bought(first, second)),
    )
    body = "".join(
        f"<tr><th>{_esc(texts[f'explore.cost.{key}'])}</th><td>{_esc(a)}</td><td>{_esc(b)}</td>"
        f"<td>{'–' if share is None else f'{share:.2f} ×'}</td></tr>"
        for key, (a, b), share in lines
    )
    sources = "".join(
        f"<p class='vf-sub'><b>{_esc(one.setup.name)}</b>: {_esc(_sources(one, texts))} {_esc(note)}</p>"
        for one, note in zip((first, second), notes, strict=True)
    )
    return (
        f'<div class="vf-scroll"><table class="vf-costs"><thead><tr><th></th>{head}'
        f"<th>{_esc(texts['explore.cost.ratio'])}</th></tr></thead><tbody>{body}</tbody></table></div>{sources}"
        f"<p class='vf-sub'>{_esc(texts['explore.cost.note'])}</p>"
    )


def _tokens_per_s(one: Cost, texts: Texts) -> str:
    return texts["estimate.tokens_per_s"].format(value=format_count(one.tokens_per_s))


def _sources(one: Cost, texts: Texts) -> str:
    price, rent = (
        texts["explore.cost.given"] if note == OWN_NOTE else note
        for note in (one.setup.price_note, one.setup.rent_note)
    )
    return texts["explore.cost.sources"].format(price=price, rent=rent)


def _usd(value: float | None) -> str:
    return "–" if value is None else format_usd(value)


def _ratio(first: Cost, second: Cost, name: str) -> float | None:
    below = getattr(second, name)
    return getattr(first, name) / below if below else None


def _bought(first: Cost, second: Cost) -> float | None:
    return first.setup.bought_usd / second.setup.bought_usd if second.setup.bought_usd else None


def _esc(text: object) -> str:
    return html.escape(str(text), quote=True)
