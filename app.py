"""VRAMFit's panel: read the flags, open the data folder, start the supervisor, serve the pages."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from jobs import file_systems
from jobs.store import Store
from vramfit.console import use_utf8
from vramfit.errors import UserError
from vramfit.places import default_data_folder, open_data_folder


def main() -> int:
    """Serve the panel until interrupted. Exit code 2 when the user's input is wrong."""
    options = read_flags()
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported: no call leaves this machine
    try:
        data_folder = open_data_folder(options.data_dir)
        check_database(data_folder)
        from ui.panel import serve

        serve(data_dir=data_folder, host=options.host, port=options.port, open_browser=not options.no_browser)
    except UserError as error:
        print(f"vramfit: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


def check_database(data_folder: Path) -> None:
    """Refuse a damaged database, and tell of a data folder on a network. Raises UserError."""
    with Store(data_folder) as store:
        store.check()
    if notice := file_systems.notice(data_folder):
        print(f"vramfit: {notice}", file=sys.stderr)


def read_flags() -> argparse.Namespace:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description="VRAMFit: train language models on the card you own.")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on (default 127.0.0.1: only you)")
    parser.add_argument("--port", type=int, default=7860, help="port to serve on (default 7860)")
    parser.add_argument("--data-dir", type=_folder, default=default_data_folder(), help="where runs are kept")
    parser.add_argument("--no-browser", action="store_true", help="do not open the page")
    return parser.parse_args()


def _folder(text: str) -> Path:
    """An empty text (a variable that is not set) must not mean the folder one happens to be in."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; give a folder, or leave the flag out")
    return Path(text)


if __name__ == "__main__":
    use_utf8()
    sys.exit(main())
