"""What README.md and docs/ show as commands: the tests compose and run them."""

import re
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PAGES = [REPO / "README.md", REPO / "SECURITY.md", *sorted((REPO / "docs").glob("*.md"))]
# what a reader fills in
FILLED_IN = {
    "<hub id or folder>": "someone/model",
    "<hub id, folder or GGUF file>": "someone/model",
    "<name>": "demo",
    "<a command>": "method=pqcache",
    **{name: f"{REPO}/docs/{name}" for name in ("my_prompts.jsonl", "my_chats.jsonl")},
    "full_attention_heads.tsv": f"{REPO}/README.md",  # a file; what is in it is read with the model
    "...": "method=pqcache",
    "<that cell's folder>": "{folder}",
    "<folder>": "{folder}",
}


def code(path: Path) -> list[str]:
    """Everything a page shows as code: lines of blocks, continued ones joined, and inline code."""
    text = re.sub(r"\\\n\s*", "", path.read_text(encoding="utf-8"))
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    lines += [line.strip() for line in text.splitlines() if re.match(r"    \S", line)]
    return [re.split(r"\s{2,}#? ?|\s#\s", line)[0] for line in lines] + re.findall(r"`([^`\n]+)`", without_blocks(text))


def without_blocks(text: str) -> str:
    """A page's text without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


def typed(beginning: str) -> list[str]:
    """Every command of the pages that begins so, each once."""
    parts = [part.strip() for path in PAGES for line in code(path) for part in line.split("&&")]
    return list(dict.fromkeys(part for part in parts if part.startswith(beginning)))
