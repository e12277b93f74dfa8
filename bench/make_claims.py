"""Writes docs/claims.md from what the planner works out: python bench/make_claims.py"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from vramfit.planning.claims import Answer, answers

PAGE = Path(__file__).parent.parent / "docs" / "claims.md"

HEAD = """# Claims, worked out

What people read about big models on small cards, and what the planner makes of it. Every figure is arithmetic of an
estimate (`vramfit/planning/claims.py`, rates of the catalogue), none is measured; `python bench/make_claims.py` writes
this page, and a test keeps it as the planner has it. Streaming, of frozen bases and of weights that train, is in
this version's engine.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(section(answer) for answer in answers())])


def section(answer: Answer) -> str:
    """One claim."""
    rows = "\n".join(f"| {figure.words} | {figure.value:,.{figure.digits}f} |" for figure in answer.figures)
    return (
        f'## "{answer.claim}": {answer.verdict}\n\n| figure | value |\n|---|---:|\n{rows}\n\n'
        f"{answer.condition}\n\nInstead: {answer.alternative}\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
