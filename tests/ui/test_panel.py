"""The panel as a server: routes, who may ask, ports, errors as cards, and what must not be loaded."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import PlainTextResponse
from fastapi.testclient import TestClient

import app
from jobs.store import PANEL_LEASE
from ui import panel
from ui.panel import Keeper, OwnHostOnly, bind, build, guarded
from ui.texts import texts_of
from vramfit.config import RunConfig
from vramfit.errors import DataError, UserError


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, in_loop: Callable[..., Any]) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("data") / "data"
    built = in_loop(lambda: build(folder, only_host="127.0.0.1"))
    with TestClient(built, base_url="http://127.0.0.1") as opened:
        yield opened
    built.state.services.store.close()


def test_panel_and_supervisor_load_no_torch() -> None:
    code = (
        "import ui.panel, jobs.supervisor, sys; "
        "print([name for name in ('torch', 'transformers', 'peft') if name in sys.modules])"
    )
    root = Path(panel.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("query", "header", "place"),
    [
        ("", "en-US", "/en/"),
        ("", "zh-CN,zh;q=0.9", "/zh/"),
        ("?lang=zh&run=3", "en", "/zh/?run=3"),
        ("?lang=xx", "en", "/en/"),
    ],
)
def test_the_front_door_leads_to_the_readers_language(client: TestClient, query: str, header: str, place: str) -> None:
    answer = client.get(f"/{query}", headers={"accept-language": header}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, place)


def test_both_languages_are_served(client: TestClient) -> None:
    assert "New run" in client.get("/en/").text
    chinese = client.get("/zh/").text
    assert "新训练" in chinese or json.dumps("新训练")[1:-1] in chinese


def test_plotly_comes_from_its_package_and_may_be_cached_for_good(client: TestClient) -> None:
    answer = client.get("/vramfit/static/plotly.min.js")
    assert answer.status_code == 200
    assert "max-age=31536000" in answer.headers["cache-control"]
    assert len(answer.content) > 1_000_000
    assert client.get("/vramfit/static/..%2Fpanel.py").status_code == 404


def test_no_file_of_ours_names_another_host() -> None:
    for name, path in panel.asset_paths().items():
        if name != "plotly.min.js":
            text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text, name
            assert "https://" not in text, name


def test_a_row_of_data_nobody_looked_at_is_one_sentence(client: TestClient) -> None:
    answer = client.get("/vramfit/data/row/nothing?number=3&find=longest")
    assert answer.status_code == 404
    assert answer.json()["error"]["remedy"] == "Choose it again."
    for wrong in ("number=-1", "find=best", "limit=x"):
        assert client.get(f"/vramfit/data/row/nothing?{wrong}").status_code == 422


def test_data_routes_answer_and_errors_are_two_sentences(client: TestClient) -> None:
    assert client.get("/vramfit/data/runs").json()["runs"] == []
    answer = client.get("/vramfit/data/run/99")
    assert answer.status_code == 404
    assert "99" in answer.json()["error"]["what"]
    assert answer.json()["error"]["remedy"]


def test_an_unexpected_error_is_one_sentence_and_the_log_has_the_rest(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> dict[str, object]:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(panel, "runs_view", broken)
    answer = client.get("/vramfit/data/runs")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    log = client.app.state.services.log_path
    assert str(log) in answer.json()["error"]["what"]
    assert "secret detail" in log.read_text(encoding="utf-8")


def test_handlers_turn_errors_into_cards(client: TestClient) -> None:
    def missing() -> dict[object, object]:
        raise DataError("a.jsonl is empty", "Choose another file.")

    def broken() -> dict[object, object]:
        raise RuntimeError("secret detail")

    options = {"texts": texts_of("en"), "log_path": Path("panel.log")}
    assert "a.jsonl is empty.</p><p>Choose another file." in guarded(missing, "card", **options)()["card"]
    card = guarded(broken, "card", **options)()["card"]
    assert "unexpected" in card
    assert "secret" not in card


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "", "["])
def test_only_this_machines_names_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/en/", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:7860", "localhost", "[::1]:7860"])
def test_this_machines_names_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/vramfit/data/runs", headers={"host": host}).status_code == 200


def test_another_site_cannot_give_orders(client: TestClient) -> None:
    address = "/en/gradio_api/run/predict"
    assert client.post(address, json={}, headers={"origin": "http://evil.example"}).status_code == 403
    assert client.post(address, json={}, headers={"origin": "http://127.0.0.1"}).status_code != 403


def test_explore_presets_and_checks_answer_as_json(client: TestClient) -> None:
    shown = client.get("/vramfit/data/explore/cost", params={"tokens": "5"}).json()
    assert "kWh" in shown["html"]
    assert client.get("/vramfit/data/explore/nonsense").json()["error"]["remedy"]
    assert "data-goal" in client.get("/vramfit/data/presets", params={"card": "plan:GeForce RTX 4090"}).json()["html"]
    assert "not estimated" in client.post("/vramfit/data/check/unknown").json()["error"]["what"]
    assert client.get("/vramfit/data/calibration").json() == {"state": "idle", "html": ""}
    for path in ("check/unknown", "calibration"):
        stranger = client.post(f"/vramfit/data/{path}", headers={"origin": "http://evil.example"})
        assert stranger.status_code == 403


def test_a_taken_port_leads_to_the_next_one() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        listener, taken = bind("127.0.0.1", port)
        with listener:
            assert taken
            assert port < listener.getsockname()[1] <= port + panel.PORTS_TRIED


def test_no_free_port_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panel, "PORTS_TRIED", 0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(UserError, match=str(other.getsockname()[1])):
            bind("127.0.0.1", other.getsockname()[1])


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("192.0.2.1", 0), ("no such host", 0)])
def test_an_impossible_address_is_one_sentence(host: str, port: int) -> None:
    with pytest.raises(UserError):
        bind(host, port)


def test_a_data_folder_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file"):
        build(tmp_path / "file")


def test_a_data_folder_in_nobodys_home_is_not_made_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="~nobody-of-this-name"):
        build(Path("~nobody-of-this-name/runs"))
    assert list(tmp_path.iterdir()) == []


def test_an_empty_data_folder_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["app.py", "--data-dir", ""])
    with pytest.raises(SystemExit) as caught:
        app.read_flags()
    assert caught.value.code == 2
    assert "it is empty" in capsys.readouterr().err


def test_the_keeper_says_that_a_panel_is_open_and_wakes_the_queue(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(panel, "ensure_running", asked.append)
    services = client.app.state.services
    keeper = Keeper(services)
    keeper.start()
    deadline = time.monotonic() + 10
    while not asked and time.monotonic() < deadline:
        time.sleep(0.02)
    keeper.stop()
    assert asked == [services.data_dir]
    assert services.store.lease(PANEL_LEASE) is not None


def test_a_new_page_shows_what_was_added_meanwhile(client: TestClient) -> None:
    run = client.app.state.services.store.add_job(RunConfig(name="From elsewhere"))
    assert client.get("/vramfit/data/run/0").json()["job"]["id"] == run


@pytest.mark.parametrize("path", ["run/abc", "run/1e+26", "run/" + "9" * 26, "run/-1", "run/1?series_after=x"])
def test_a_malformed_address_is_one_sentence(client: TestClient, path: str) -> None:
    answer = client.get(f"/vramfit/data/{path}")
    assert 400 <= answer.status_code < 500
    assert set(answer.json()["error"]) == {"what", "remedy"}


@pytest.mark.parametrize(
    ("served_at", "host", "own"),
    [
        ("0.0.0.0", "192.168.1.5:7860", True),
        ("0.0.0.0", "box.local", True),
        ("0.0.0.0", "box:7860", True),
        ("0.0.0.0", "localhost", True),
        ("::", "[fe80::1]:7860", True),
        ("box.example", "BOX.example:7860", True),
        ("0.0.0.0", "evil.example", False),
        ("0.0.0.0", "192.168.1.5.evil.example", False),
        ("0.0.0.0", "", False),
        ("192.168.1.5", "evil.example", False),
        ("box.example", "evil.example", False),
        ("127.0.0.1", "192.168.1.5", False),
    ],
)
def test_a_panel_in_a_network_answers_to_no_strangers_name(served_at: str, host: str, own: bool) -> None:
    guarded_app = OwnHostOnly(PlainTextResponse("yes"), host=served_at)
    client = TestClient(guarded_app, base_url="http://127.0.0.1")
    answer = client.get("/", headers={"host": host})
    assert answer.status_code == (200 if own else 403)
    if own:
        assert client.post("/", headers={"host": host, "origin": "http://evil.example"}).status_code == 403
        assert client.post("/", headers={"host": host, "origin": f"http://{host}"}).status_code == 200


def test_a_handler_that_changes_nothing_is_an_answer_too(tmp_path: Path) -> None:
    safe = guarded(dict, "answer", texts=texts_of("en"), log_path=tmp_path / "log")
    assert list(safe()) == ["answer"]
    assert "value" not in safe()["answer"]
