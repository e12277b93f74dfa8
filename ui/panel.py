"""Places the pages, serves them, keeps the queue alive, and turns errors into cards.

The panel owns no run: it adds rows to the store and reads rows. One process, one port: FastAPI with our read-only data
routes under /vramfit/ and one Gradio page per language at /en/ and /zh/.
"""

from __future__ import annotations

import os

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported: it looks things up on the net otherwise

import errno
import functools
import html
import ipaddress
import json
import logging
import socket
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlencode, urlsplit

import gradio as gr
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, Response
from pydantic import BaseModel, Field
from starlette.types import ASGIApp, Receive, Scope, Send

from jobs.store import Store
from jobs.supervisor import ensure_running
from ui.alerts import alerts_view, set_webhook, try_webhook
from ui.calibration import Calibrator
from ui.checks import Checks
from ui.estimate import notice_card
from ui.explore import Explorer, page_html
from ui.monitor import Cursor, run_view
from ui.new_run import NewRun
from ui.preset_buttons import Presets
from ui.preview import Previewer
from ui.row_view import Find, row_view
from ui.runs import act as act_on
from ui.runs import runs_view
from ui.texts import LANGUAGES, Texts, preferred, texts_of
from vramfit import __version__
from vramfit.errors import InternalError, UserError, VramfitError
from vramfit.places import open_data_folder

ASSETS: Final = Path(__file__).parent / "assets"
LOG: Final = "panel.log"
PORTS_TRIED: Final = 20
KEEP_ALIVE_S: Final = 5.0
PROBE_EVERY_S: Final = 30.0
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_YEAR: Final = "public, max-age=31536000, immutable"

Number = Annotated[int, Field(ge=0, lt=2**63)]
"""What SQLite can count."""

log = logging.getLogger("vramfit.panel")


class Address(BaseModel):
    """What the page sends about the webhook: in the body, because addresses of requests end up in logs."""

    address: str = Field(max_length=10_000)


@dataclass(frozen=True, kw_only=True)
class Services:
    """What the pages need: where things lie, the rows, and the arithmetic."""

    data_dir: Path
    store: Store
    previewer: Previewer
    explorer: Explorer
    presets: Presets
    checks: Checks
    calibrator: Calibrator

    @classmethod
    def of(cls, folder: Path) -> Services:
        """All of them, for one data folder."""
        store, previewer = Store(folder), Previewer(folder)
        return cls(
            data_dir=folder,
            store=store,
            previewer=previewer,
            explorer=Explorer(previewer),
            presets=Presets(previewer),
            checks=Checks(),
            calibrator=Calibrator(store, previewer),
        )

    @property
    def log_path(self) -> Path:
        return self.data_dir / LOG


def build(data_dir: Path, *, only_host: str = "127.0.0.1") -> FastAPI:
    """The whole panel as an ASGI app. `only_host`: the address it is served at, which decides what Host it answers to.

    Raises UserError when the data folder cannot be used.
    """
    folder = open_data_folder(data_dir)
    os.environ.setdefault("GRADIO_TEMP_DIR", str(folder / "cache" / "panel"))
    _log_to(folder / LOG)
    services = Services.of(folder)
    app = FastAPI(title="VRAMFit", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.services = services
    _add_routes(app, services)
    for language in LANGUAGES:
        texts = texts_of(language)
        gr.mount_gradio_app(
            app,
            build_pages(services, texts),
            path=f"/{language}",
            footer_links=[],
            run_history=False,
            ssr_mode=False,
            show_error=True,
            theme=theme(),
            head=_head(texts),
        )
    app.add_middleware(OwnHostOnly, host=only_host)
    return app


def serve(host: str, port: int, data_dir: Path, open_browser: bool = True) -> None:
    """Run the panel until it is interrupted. Raises UserError when the folder or the address cannot be used."""
    listener, taken = bind(host, port)
    with listener:
        app = build(data_dir, only_host=host)
        services: Services = app.state.services
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        address = f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}/"
        if taken:
            print(
                f"Port {port} is taken by another program, so the panel uses {listener.getsockname()[1]}.", flush=True
            )
        keeper = Keeper(services)
        keeper.start()
        print(f"VRAMFit {__version__} is at {address}  (data in {services.data_dir})", flush=True)
        if open_browser:
            threading.Timer(0.5, webbrowser.open, [address]).start()
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2, access_log=False)
        try:
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            keeper.stop()
            services.checks.end()
            services.store.close()


def bind(host: str, port: int) -> tuple[socket.socket, bool]:
    """A listening socket at `port` or the next free one after it, and whether `port` itself was taken.

    Raises UserError when the address is not this machine's, or no port nearby is free.
    """
    if not 0 <= port <= 65535:
        raise UserError(f"Port {port} does not exist: ports go from 0 to 65535", "Choose another one with --port.")
    last = min(port + PORTS_TRIED, 65535)
    for candidate in range(port, last + 1):
        try:
            return _bound(host, candidate), candidate != port
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES) and not isinstance(error, PermissionError):
                reason = error.strerror or str(error)
                raise UserError(
                    f"The panel cannot listen at {host}: {reason}",
                    "Use --host 127.0.0.1, or an address of this machine.",
                ) from error
    raise UserError(
        f"The ports {port} to {last} are all taken or not allowed", "Close the other program, or choose with --port."
    )


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # on Windows this option lets two programs share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)  # from here on a browser that comes early waits instead of being refused
    except OSError:
        listener.close()
        raise
    return listener


# ---- the pages ------------------------------------------------------------------------------------------------


def build_pages(services: Services, texts: Texts) -> gr.Blocks:
    """The four pages in one language. Which one shows is the address's business (assets/panel.js)."""
    store = services.store
    guard = functools.partial(guarded, texts=texts, log_path=services.log_path)
    quick: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    blocks: gr.Blocks
    with gr.Blocks(title="VRAMFit", analytics_enabled=False) as blocks:
        gr.HTML(
            _header(texts), elem_id="header", apply_default_css=False, js_on_load="window.VF.mount('Header', element)"
        )
        with gr.Column(elem_id="page-new", elem_classes="vf-page"):
            page = NewRun(
                store=store,
                previewer=services.previewer,
                texts=texts,
                guard=guard,
                presets=services.presets,
                checks=services.checks,
            )
        with gr.Column(elem_id="page-explore", elem_classes="vf-page"):
            gr.HTML(
                page_html(services.previewer, texts),
                apply_default_css=False,
                js_on_load="window.VF.mount('Explore', element)",
            )
        with gr.Column(elem_id="page-monitor", elem_classes="vf-page"):
            monitor_note = gr.HTML("", elem_classes="vf-page-note", apply_default_css=False)
            monitor = gr.HTML(
                '<div class="vf-monitor"></div>',
                apply_default_css=False,
                js_on_load="window.VF.mount('Monitor', element, trigger)",
            )
        with gr.Column(elem_id="page-runs", elem_classes="vf-page"):
            gr.HTML(f"<h1>{html.escape(texts['runs.title'])}</h1>", elem_classes="vf-lead", apply_default_css=False)
            runs_note = gr.HTML("", elem_classes="vf-page-note", apply_default_css=False)
            runs = gr.HTML(
                '<div class="vf-runs"></div>',
                apply_default_css=False,
                js_on_load="window.VF.mount('Runs', element, trigger)",
            )
            gr.HTML(
                '<div class="vf-alerts"></div>',
                apply_default_css=False,
                js_on_load="window.VF.mount('Alerts', element)",
            )

        def on_action(note: Any) -> Callable[[gr.EventData], dict[Any, Any]]:
            def act(event: gr.EventData) -> dict[Any, Any]:
                action, run = str(event.action), int(event.run)
                fill = {"copy": page.on_copy, "tune": page.on_tune, "edit": page.on_edit}.get(action)
                if fill is not None:
                    return {note: "", **fill(run)}
                wish: dict[str, Any] = (
                    {"after": int(event.after), "anyway": bool(event.anyway)} if action == "after" else {}
                )
                act_on(store, action, run, **wish)
                ensure_running(services.data_dir)
                return {note: ""}

            return act

        for part, note in ((monitor, monitor_note), (runs, runs_note)):
            # "multiple": else a click is dropped while the one before is under way, and these are different buttons.
            act = guard(on_action(note), note)
            part.click(act, outputs=[note, *page.outputs], trigger_mode="multiple", **quick)
        blocks.load(
            guard(page.on_load, page.answer),
            outputs=[page.widgets["model.source"], page.widgets["device"], page.estimate, page.answer],
            **quick,
        )
    return blocks


def guarded(
    handler: Callable[..., dict[Any, Any]], answer: Any, *, texts: Texts, log_path: Path
) -> Callable[..., dict[Any, Any]]:
    """`handler`, with an exception turned into a card in `answer`: ours as it is, any other as one plain sentence."""

    @functools.wraps(handler)
    def safe(*args: Any, **kwargs: Any) -> dict[Any, Any]:
        try:
            # gradio takes an empty dict for one value too few, not for "nothing changes".
            return handler(*args, **kwargs) or {answer: gr.skip()}
        except VramfitError as error:
            log.warning("%s", error)
            return {answer: notice_card(error, texts)}
        except Exception:
            log.exception("in %s", getattr(handler, "__qualname__", handler))
            return {answer: notice_card(unexpected(texts, log_path), texts)}

    return safe


def unexpected(texts: Texts, log_path: Path) -> InternalError:
    """What a person reads when it is our own fault."""
    return InternalError(texts["error.unexpected"].format(log=log_path), texts["error.remedy"])


def theme() -> gr.themes.Base:
    """Gradio's plain theme in our colours, with the fonts the system has: nothing is fetched from anywhere."""
    sans = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "Noto Sans SC", "sans-serif")
    mono = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")
    return gr.themes.Base(
        primary_hue="teal",
        neutral_hue="slate",
        radius_size="md",
        font=[gr.themes.Font(name) for name in sans],
        font_mono=[gr.themes.Font(name) for name in mono],
    )


def _header(texts: Texts) -> str:
    other = next(language for language in LANGUAGES if language != texts.language)
    links = "".join(
        f'<a href="?view={page}" data-page="{page}">{html.escape(texts["nav." + page])}</a>'
        for page in ("new", "explore", "monitor", "runs")
    )
    return (
        '<div class="vf-header"><a class="vf-logo" href="?view=new" data-page="new"><i></i>VRAMFit</a>'
        f'<nav class="vf-nav">{links}</nav>'
        f'<span class="vf-tools"><a href="/{other}/" data-language="{other}">{texts["nav.language"]}</a>'
        f'<button type="button" data-theme-switch title="{texts["nav.theme"]}" aria-label="{texts["nav.theme"]}">'
        "◐</button></span></div>"
    )


# gradio adds our scripts to a page that it is building already: a part may be there before the script that it needs.
_MOUNT: Final = (
    "VF.mount=(part,...given)=>VF[`mount${part}`]?VF[`mount${part}`](...given):setTimeout(VF.mount,20,part,...given);"
)


def _head(texts: Texts) -> str:
    """Our style and scripts; the words they need are written into the page."""
    known = {"language": texts.language, "words": texts.words, "plotly": _asset_url("plotly.min.js")}
    # "<" as an escape, so that no text can end the script element.
    values = json.dumps(known, ensure_ascii=False).replace("<", "\\u003c")
    scripts = "".join(
        f'<script src="{_asset_url(name)}"></script>'
        for name in ("panel.js", "monitor.js", "runs.js", "alerts.js", "explore.js")
    )
    return (
        f'<link rel="icon" href="{_asset_url("icon.svg")}" type="image/svg+xml">'
        f'<link rel="stylesheet" href="{_asset_url("panel.css")}">'
        f"<script>window.VF={values};{_MOUNT}</script>{scripts}"
    )


# ---- the routes -----------------------------------------------------------------------------------------------

_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def asset_paths() -> dict[str, Path]:
    """The static files we serve, by name: our own and plotly's script out of its Python package."""
    own = {path.name: path for path in ASSETS.iterdir() if path.suffix in _TYPES}
    return {**own, "plotly.min.js": Path(str(files("plotly") / "package_data" / "plotly.min.js"))}


@functools.cache
def _asset_url(name: str) -> str:
    """The file's address with its time of change, so that it may be cached for good."""
    return f"/vramfit/static/{name}?v={asset_paths()[name].stat().st_mtime_ns:x}"


def _add_routes(app: FastAPI, services: Services) -> None:
    store, assets = services.store, asset_paths()

    @app.exception_handler(VramfitError)
    def known_error(_: Request, error: VramfitError) -> JSONResponse:
        return JSONResponse({"error": {"what": error.what, "remedy": error.remedy}}, status_code=404)

    @app.exception_handler(RequestValidationError)
    def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        what = f"The address {request.url.path[:80]} names no run of this panel"
        return JSONResponse({"error": {"what": what, "remedy": "Choose a run on the Runs page."}}, status_code=422)

    @app.get("/", include_in_schema=False)
    def front(request: Request) -> Response:
        wanted = dict(request.query_params)
        language = wanted.pop("lang", "")
        if language not in LANGUAGES:
            language = preferred(request.headers.get("accept-language", ""))
        query = f"?{urlencode(wanted)}" if wanted else ""
        return RedirectResponse(f"/{language}/{query}", status_code=307)

    @app.get("/favicon.ico", include_in_schema=False)
    def icon() -> Response:
        return FileResponse(assets["icon.svg"], media_type=_TYPES[".svg"])

    @app.get("/vramfit/static/{name}")
    def static(name: str) -> Response:
        if name not in assets:
            raise HTTPException(404)
        path = assets[name]
        return FileResponse(path, media_type=_TYPES[path.suffix], headers={"cache-control": _YEAR})

    @app.get("/vramfit/data/runs")
    def runs(lang: str = "en") -> Response:
        return _answer(services, lang, lambda texts: runs_view(store, texts))

    @app.get("/vramfit/data/alerts")
    def alerts(lang: str = "en", after: Number | None = None) -> Response:
        return _answer(services, lang, lambda texts: alerts_view(store, texts, after=after))

    @app.post("/vramfit/data/webhook")
    def webhook(wish: Address, lang: str = "en") -> Response:
        set_webhook(store, wish.address, texts_of(lang))
        return alerts(lang)

    @app.post("/vramfit/data/webhook/test")
    def test_webhook(wish: Address, lang: str = "en") -> Response:
        return _answer(services, lang, lambda texts: try_webhook(store, wish.address, texts))

    @app.get("/vramfit/data/row/{token}")
    def row(
        token: str, lang: str = "en", number: Number = 1, limit: Number | None = None, how: str = "cut", find: Find = ""
    ) -> Response:
        samples = services.previewer.samples
        return _answer(
            services,
            lang,
            lambda texts: row_view(samples, texts, token=token, number=number, limit=limit, how=how, find=find),
        )

    @app.get("/vramfit/data/explore/{part}")
    def explore(part: str, request: Request, lang: str = "en") -> Response:
        query = dict(request.query_params)
        return _answer(services, lang, lambda texts: services.explorer.view(part, query, texts))

    @app.get("/vramfit/data/presets")
    def presets(lang: str = "en", card: str = "auto") -> Response:
        return _answer(services, lang, lambda texts: services.presets.view(card, texts))

    @app.get("/vramfit/data/check/{token}")
    def check(token: str, lang: str = "en") -> Response:
        return _answer(services, lang, lambda texts: services.checks.view(token, texts))

    @app.post("/vramfit/data/check/{token}")
    def start_check(token: str, lang: str = "en") -> Response:
        services.checks.start(token)
        return check(token, lang)

    @app.get("/vramfit/data/calibration")
    def calibration(lang: str = "en") -> Response:
        return _answer(services, lang, services.calibrator.view)

    @app.post("/vramfit/data/calibration")
    def start_calibration(lang: str = "en") -> Response:
        services.calibrator.start(texts_of(lang))
        return calibration(lang)

    @app.get("/vramfit/data/run/{run}")
    def run(
        run: Number,
        lang: str = "en",
        series_after: Number = 0,
        series_stride: Number | None = None,
        telemetry_after: Number = 0,
        telemetry_stride: Number | None = None,
        drift_after: Number = 0,
        drift_stride: Number | None = None,
        revision: Number | None = None,
        events_after: Number = 0,
        samples_known: int = -1,
        want_log: int = 0,
    ) -> Response:
        cursor = Cursor(
            series_after=series_after,
            series_stride=series_stride,
            telemetry_after=telemetry_after,
            telemetry_stride=telemetry_stride,
            drift_after=drift_after,
            drift_stride=drift_stride,
            revision=revision,
            events_after=events_after,
            samples_known=samples_known,
        )
        return _answer(services, lang, lambda texts: run_view(store, run, cursor, texts, with_log=bool(want_log)))


def _answer(services: Services, language: str, view: Callable[[Texts], dict[str, Any]]) -> Response:
    """A view as JSON; an unexpected error as one sentence, its traceback in the log."""
    texts = texts_of(language)
    try:
        return JSONResponse(view(texts), headers={"cache-control": "no-store"})
    except VramfitError:
        raise
    except Exception:
        log.exception("in a data route")
        error = unexpected(texts, services.log_path)
        return JSONResponse({"error": {"what": error.what, "remedy": error.remedy}}, status_code=500)


class OwnHostOnly:
    """Refuses requests meant for another host, and writes from another site.

    A page elsewhere can point its own host name at this machine (DNS rebinding) or post to it; the first is told by the
    Host header, the second by Origin. Served at a loopback address, only loopback names are its own. Served to a
    network, every bare IP address and every name that no stranger can own is: single words, `.local`, this machine's.
    """

    def __init__(self, app: ASGIApp, *, host: str) -> None:
        self.app, self._served_at = app, host.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get("host", ""), headers.get("origin", "")
        if not self._is_own(_hostname(f"//{host}")):
            way = (
                ""
                if self._served_at in LOOPBACK
                else ", another address of this machine, or the name given with --host"
            )
            at = "127.0.0.1" if self._served_at in (*LOOPBACK, "0.0.0.0", "::", "") else self._served_at
            return await _refuse(f"This panel answers only at {at}{way}, not at {host!r}.")(scope, receive, send)
        if scope.get("method") not in ("GET", "HEAD") and origin and urlsplit(origin).netloc != host:
            return await _refuse(f"This panel takes no orders from {origin!r}.")(scope, receive, send)
        return await self.app(scope, receive, send)

    def _is_own(self, name: str) -> bool:
        if name in LOOPBACK or (name and name == self._served_at):
            return True
        if self._served_at in LOOPBACK or not name:
            return False
        own = {socket.gethostname().lower(), socket.getfqdn().lower()} if "." in name else set()
        return _is_address(name) or "." not in name or name.endswith(".local") or name in own


def _hostname(address: str) -> str:
    try:
        return (urlsplit(address).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refuse(sentence: str) -> Response:
    return Response(sentence, status_code=403, media_type="text/plain")


# ---- the background -------------------------------------------------------------------------------------------


class Keeper(threading.Thread):
    """Every few seconds: says that a panel is open, makes sure somebody runs the queue, and looks at the machine.

    The machine is looked at only while no run is at work, or its memory would count as taken in the next estimate.
    """

    def __init__(self, services: Services) -> None:
        super().__init__(name="panel-keeper", daemon=True)
        self._services = services
        self._ended = threading.Event()

    def stop(self) -> None:
        """End soon, and wait for it a moment."""
        self._ended.set()
        if self.is_alive():
            self.join(timeout=5)

    def run(self) -> None:
        while not self._ended.is_set():
            for duty in (self._services.store.panel_alive, self._queue, self._look):
                try:
                    duty()
                except Exception:
                    log.exception("in the panel's background")
            self._ended.wait(KEEP_ALIVE_S)

    def _queue(self) -> None:
        ensure_running(self._services.data_dir)

    def _look(self) -> None:
        previewer = self._services.previewer
        if previewer.age_s > PROBE_EVERY_S and not self._services.store.active_jobs():
            previewer.refresh()


def _log_to(path: Path) -> None:
    """Warnings and tracebacks go to the data folder's file. Building the panel again moves the log."""
    for old in [handler for handler in log.handlers if isinstance(handler, logging.FileHandler)]:
        log.removeHandler(old)
        old.close()
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
