"""The process that looks at data with a model's tokenizer, for the panel, which loads none:
python -m vramfit.data.sample_worker --cache FOLDER. Requests as JSON lines on stdin, replies as JSON lines on stdout.

A request has `do` ("sample", "row" or "next_left_out"), `config` (a RunConfig), `data` and `model` (texts that change
when the files or the tokenizer do) and `number`, a row. What was opened is kept for the next request. The process ends
when its input does, and when nobody has asked for a while.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

from vramfit.config import RunConfig
from vramfit.data.sample import DataSet
from vramfit.errors import UserError, VramfitError

IDLE_S: Final = 600.0
KEPT_DATA_SETS: Final = 3
KEPT_TOKENIZERS: Final = 2


class Worker:
    """Answers requests one by one, each with {"found": ...} or {"error": {kind, what, remedy}}."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._data: OrderedDict[tuple[str, str], DataSet] = OrderedDict()
        self._tokenizers: OrderedDict[str, Any] = OrderedDict()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            data = self._data_set(request)
            match request["do"]:
                case "sample":
                    return {"found": data.sample()}
                case "next_left_out":
                    return {"found": data.next_left_out(request["number"])}
            view = data.view(request["number"])
            if view is None:
                raise UserError(f"There is no row {request['number'] + 1:,}", "Choose a smaller number.")
            return {"found": view}
        except VramfitError as error:
            return {"error": {"kind": type(error).__name__, "what": error.what, "remedy": error.remedy}}

    def _data_set(self, request: dict[str, Any]) -> DataSet:
        key = request["data"], request["model"]
        if key not in self._data:
            config = RunConfig.parse(request["config"])
            tokenizer = self._tokenizer(request["model"], config)
            self._data[key] = DataSet(config.data, tokenizer=tokenizer, cache=self._cache)
        self._data.move_to_end(key)
        while len(self._data) > KEPT_DATA_SETS:
            self._data.popitem(last=False)
        return self._data[key]

    def _tokenizer(self, key: str, config: RunConfig) -> Any:
        if key in self._tokenizers:
            return self._tokenizers[key]
        from vramfit.models.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(config.model, self._cache)
        if tokenizer.chat_template:  # an encoder gives one to those without, and is to say so each time
            self._tokenizers[key] = tokenizer
            while len(self._tokenizers) > KEPT_TOKENIZERS:
                self._tokenizers.popitem(last=False)
        return tokenizer


def _read(requests: queue.Queue[bytes]) -> None:
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)  # the panel is gone: whatever is at work, nobody waits for it


def main() -> None:
    """Answer until the input ends or nobody asks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    worker = Worker(parser.parse_args().cache)
    # transformers imports torch where it finds it, which takes longer than all the rest; tokenizers need none.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # so it need not tell that it found none
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    if hasattr(os, "nice"):
        os.nice(10)  # the panel reads the whole data set meanwhile, and a run may be at work
    replies, sys.stdout = sys.stdout.buffer, sys.stderr  # what a library prints is no reply
    requests: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    while True:
        try:
            line = requests.get(timeout=IDLE_S)
        except queue.Empty:
            return
        reply = worker.answer(json.loads(line))
        replies.write(json.dumps(reply, ensure_ascii=True).encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    main()
