"""The webhook: alerts posted as JSON to an address that a person gave, by a thread of the supervisor.

The address is a secret (who knows it can post there): it is never printed whole, nor in any message.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

from vramfit.errors import UserError

if TYPE_CHECKING:
    from jobs.store import Store

TIMEOUT_S: Final = 10.0
POLL_S: Final = 1.0
LONGEST_ADDRESS: Final = 2000


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back: a status, or None and the `problem` that kept one from coming."""

    status: int | None
    problem: str = ""

    @property
    def ok(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    @property
    def said(self) -> str:
        """As one sentence."""
        if self.status is None:
            return self.problem
        try:
            name = HTTPStatus(self.status).phrase
        except ValueError:
            name = ""
        return f"It answered {self.status} {name}".rstrip() + "."


def checked_address(text: str) -> str:
    """The address without blanks around it. Raises UserError when nothing can be posted to it; the message leaves out
    all of it but the scheme."""
    address = text.strip()
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme not in ("http", "https"):
        raise UserError(
            "The webhook's address does not begin with http:// or https://", "Copy it from the service that takes it."
        )
    if not host or port == 0 or not address.isascii() or not address.isprintable() or " " in address:
        raise UserError(
            "The webhook's address cannot be used: its host or its port is missing or misspelt, or it has blanks or "
            "letters that an address cannot have",
            "Copy it again, whole, from the service that takes it.",
        )
    if parts.username is not None or parts.password is not None:
        raise UserError(
            "The webhook's address has a user name or password in it", "Use an address with its key in the path."
        )
    if len(address) > LONGEST_ADDRESS:
        raise UserError(
            f"The webhook's address has {len(address):,} characters; {LONGEST_ADDRESS:,} are allowed",
            "Copy it again from the service that takes it.",
        )
    return address


def shown_address(address: str) -> str:
    """The part that is no secret: scheme, host and port."""
    if not address:
        return ""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc}/…"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """An order to ask elsewhere is an answer like any other: the body goes to the host that was named, to no other."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def post(address: str, body: Mapping[str, Any], *, key: str = "", timeout_s: float = TIMEOUT_S) -> Answer:
    """Post `body` as JSON and tell what came back. Never raises. `key` names the message, the same at each try, so that
    a receiver can tell one that it had already. `timeout_s` holds for connecting and for the answer."""
    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "VRAMFit"}
    if key:
        headers["Idempotency-Key"] = key
    try:
        request = urllib.request.Request(
            checked_address(address), data=json.dumps(body, ensure_ascii=False).encode(), headers=headers, method="POST"
        )
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s) as response:
            return Answer(status=int(response.status))
    except urllib.error.HTTPError as error:
        error.close()
        return Answer(status=error.code)
    except TimeoutError:
        return _no_answer(timeout_s)
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            return _no_answer(timeout_s)
        return Answer(status=None, problem=f"It could not be reached: {_reason(error.reason)}.")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Answer(status=None, problem=f"It gave no answer that can be read: {_reason(error)}.")
    except UserError as error:
        return Answer(status=None, problem=f"{error.what}.")


def _no_answer(timeout_s: float) -> Answer:
    return Answer(status=None, problem=f"It gave no answer within {timeout_s:g} s.")


def _reason(error: object) -> str:
    """The system's words for it, or the error's name: messages of the HTTP library may quote the address."""
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__


class Sender(threading.Thread):
    """Posts what waits, one alert after the other, while the caller holds the supervisor's lease as `owner`.

    What it does takes its own time and no one else's. Use as a context manager.
    """

    def __init__(
        self,
        store: Store,
        *,
        owner: str,
        say: Callable[[str], None] = print,
        timeout_s: float = TIMEOUT_S,
        poll_s: float = POLL_S,
    ) -> None:
        super().__init__(name="webhook", daemon=True)
        self._store, self._owner, self._say = store, owner, say
        self._timeout_s, self._poll_s = timeout_s, poll_s
        self._ended = threading.Event()
        self._unwritten: tuple[int, int, str | None] | None = None  # an answer that the database did not take yet

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join(timeout=1.0)  # one in mid-post is left: its alert is tried again by the next supervisor

    def run(self) -> None:
        while not self._ended.wait(self._poll_s):
            try:
                while self.send_next() and not self._ended.is_set():
                    pass
            except UserError as error:
                self._say(f"alerts wait: {error}")
            except Exception:
                traceback.print_exc(file=sys.stderr)

    def send_next(self) -> bool:
        """Send the alert whose time has come. False: there is none. Raises UserError when the store does not answer.

        An answer is written down before anything else is sent, however long the database takes, so that what was
        answered with success is not sent again.
        """
        self._write_answer()
        found = self._store.claim_alert(self._owner)
        if found is None:
            return False
        alert, address = found
        key = f"vramfit-{alert.job}-{alert.id}-{alert.created_at:.3f}"
        answer = post(address, {"alert": alert.id, **alert.body}, key=key, timeout_s=self._timeout_s)
        self._unwritten = (alert.id, alert.tries, None if answer.ok else answer.said)
        self._say(f"Alert {alert.id} ({alert.kind}, job {alert.job}) to {shown_address(address)}: {answer.said}")
        self._write_answer()
        return True

    def _write_answer(self) -> None:
        if self._unwritten is not None:
            id_, tries, error = self._unwritten
            self._store.note_alert(id_, tries=tries, error=error)
            self._unwritten = None
