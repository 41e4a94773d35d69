"""Results of peers.py as a page: a table in docs/performance.md, and bars beside it."""

import html
import pathlib
import re
from collections.abc import Sequence
from typing import Any

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "performance.md"
ORDER = ("t5x", "Hugging Face", "Hugging Face, compiled", "CTranslate2", "seqio")
COLOURS = dict(zip(ORDER, ("#2563eb", "#9ca3af", "#6b7280", "#d1a054", "#b08bbb"), strict=True))

Row = dict[str, Any]


def write(results: Sequence[Sequence[Row]], page: pathlib.Path = PAGE) -> None:
    """Write the rows of several runs, each on its device, into their sections of the page."""
    by_name: dict[str, list[Row]] = {}
    for row in (row for rows in results for row in rows):
        by_name.setdefault(section_of(row["device"]), []).append(row)
    text = page.read_text()
    for name, rows in by_name.items():
        drawing = page.with_name(f"performance-{name}.svg")
        drawing.write_text(bars(rows))
        text = replaced(text, name, f"{table(rows)}\n\n![The same as bars]({drawing.name})\n")
    page.write_text(text)


def section_of(device: str) -> str:
    return "gpu" if re.search(r"NVIDIA|AMD Instinct|TPU", device) else "cpu"


def replaced(text: str, name: str, inner: str) -> str:
    begin, end = f"<!-- peers {name} -->", "<!-- end -->"
    head, marker, tail = text.partition(begin)
    if not marker or end not in tail:
        raise SystemExit(f"The page has no place for this: a line {begin}, and a line {end} after it.")
    return f"{head}{begin}\n{inner}{end}{tail.split(end, 1)[1]}"


def label_of(row: Row) -> str:
    """
    >>> label_of({"work": "beam4", "size": "base", "batch": 64, "inputs": 512, "targets": 128})
    'beam4, base, batch 64, 512 in, 128 out'
    """
    out = "" if row["work"] == "score" else f", {row['targets']} out"
    size = "" if row["size"] is None else f"{row['size']}, "
    return f"{row['work']}, {size}batch {row['batch']}, {row['inputs']} in{out}"


def names_of(rows: Sequence[Row]) -> list[str]:
    return [name for name in ORDER if any(name in row["contenders"] for row in rows)]


def table(rows: Sequence[Row]) -> str:
    names = names_of(rows)
    lines = [
        f"| work ({rows[0]['device']}) | unit | {' | '.join(names)} | t5x / best peer |",
        f"|---|---|{'---:|' * (len(names) + 1)}",
    ]
    for row in rows:
        rates = {name: result["rate"] for name, result in row["contenders"].items()}
        cells = [f"{rates[name]:,.0f}" if rates.get(name, 0) >= 100 else shown(rates.get(name)) for name in names]
        peers = [rate for name, rate in rates.items() if name != "t5x"]
        ratio = f"{rates['t5x'] / max(peers):.2f}" if peers else "-"
        dtype = f", {row['dtype']}" if row["dtype"] else ""
        lines.append(f"| {label_of(row)}{dtype} | {row['unit']} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


def shown(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.3g}"


def bars(rows: Sequence[Row]) -> str:
    """Return an SVG: for each work, a bar for each contender; the longest bar spans the drawing."""
    left, width, thick, gap = 300, 380, 16, 14
    parts, y = [], 34
    x = 10
    for name in names_of(rows):
        parts.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 17}" y="21">{html.escape(name)}</text>')
        x += 40 + 7 * len(name)
    for row in rows:
        rates = [(name, row["contenders"][name]["rate"]) for name in ORDER if name in row["contenders"]]
        longest = max(rate for _, rate in rates)
        middle = y + gap + thick * len(rates) / 2 + 4
        parts.append(f'<text x="{left - 8}" y="{middle:g}" text-anchor="end">{html.escape(label_of(row))}</text>')
        y += gap
        for name, rate in rates:
            size = max(1.0, width * rate / longest)
            parts.append(f'<rect x="{left}" y="{y}" width="{size:.1f}" height="{thick - 2}" fill="{COLOURS[name]}"/>')
            value = f"{rate:,.0f}" if rate >= 100 else shown(rate)
            parts.append(f'<text x="{left + size + 5:.1f}" y="{y + 11}">{value} {row["unit"]}</text>')
            y += thick
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 150}" height="{y + 14}"'
    style = 'font-family="sans-serif" font-size="12" fill="#111827"'
    back = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([f"{head} {style}>", back, *parts, "</svg>", ""])
