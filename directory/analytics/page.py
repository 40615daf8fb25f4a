"""The report as one HTML file: no script, no font, no picture from anywhere else.

Owns the order and the words of the page. It must never compute a figure that `figures.py` does not
have, and everything that comes from a file (names, tenants) is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Final

from directory.analytics.attribution import Cause
from directory.analytics.charts import SOURCE_NAMES, Chart, all_charts, used_sources
from directory.analytics.figures import Figures
from directory.analytics.words import capacity, count, duration, named, percent, size

CAUSE_NAMES: Final = {
    Cause.EVICTED: "Evicted",
    Cause.NOT_RESTORABLE: "Not restorable",
    Cause.OTHER_NAMESPACE: "In another namespace",
    Cause.DIVERGED: "Diverged from an earlier prompt",
    Cause.NEVER_SEEN: "Never seen",
    Cause.PARTIAL_TAIL: "Partial tail",
}
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


def page(figures: Figures) -> str:
    """The whole document."""
    style = (files("directory.analytics") / "style.css").read_text(encoding="utf-8")
    charts = {chart.name: chart for chart in all_charts(figures)}
    sections = [
        _chart(charts.get("over-time"), _over_time_table(figures)),
        _causes(figures),
        _chart(charts.get("miss-ratio"), _curve_table(figures), _more(figures)),
        _chart(charts.get("reuse-distance"), _distance_table(figures)),
        _chart(charts.get("working-set"), _working_table(figures)),
        _tenants(figures),
        _instances(figures),
    ]
    name = escape(figures.file)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>Cache report: {name}</title><style>{style}</style></head><body><main>"
        f"<h1>Cache report: {name}</h1>{_introduction(figures)}{_notices(figures)}"
        f"{_tiles(figures)}{''.join(sections)}{_footer(figures)}</main></body></html>\n"
    )


def _introduction(figures: Figures) -> str:
    if figures.basis == "observed":
        basis = "hits are what the caches did"
    elif figures.simulated_pages is None:
        basis = "hits are simulated: one cache shared by all requests that never evicts"
    else:
        held = capacity(figures.simulated_pages, figures.page_bytes)
        basis = f"hits are simulated: one LRU cache of {held} shared by all requests"
    return (
        f'<p class="soft">{escape(figures.format)}, {count(figures.requests)} requests over '
        f"{duration(figures.span_s)}, pages of {figures.page_tokens} tokens; {basis}.</p>"
    )


def _notices(figures: Figures) -> str:
    said = []
    if figures.dropped_records:
        said.append(f"{count(figures.dropped_records)} records were dropped when this was written")
    log = figures.log
    if log is not None and (log.damaged_blocks or log.torn_bytes):
        said.append(
            f"{log.damaged_blocks} damaged blocks and {size(log.torn_bytes)} at the end of files "
            "could not be read"
        )
    if figures.other_page_sizes:
        said.append(
            f"{count(figures.other_page_sizes)} requests have pages of another size: they are in "
            "the sums, and in no curve and no cause"
        )
    return "".join(f'<p class="notice">{words}.</p>' for words in said)


def _tiles(figures: Figures) -> str:
    hits, tokens = figures.hit_tokens, figures.prompt_tokens
    sources = ", ".join(
        f"{SOURCE_NAMES[s]} {percent(getattr(hits, s) / tokens)}" for s in used_sources(figures)
    )
    beside = figures.beside
    aside = [
        f"{count(number)} {name}"
        for number, name in (
            (beside.retries, "retries"),
            (beside.recomputations, "recomputations"),
            (beside.probes, "probes"),
        )
        if number
    ]
    tiles = (
        ("Block hit ratio", percent(figures.block_hit_ratio), f"of {count(figures.blocks)} blocks"),
        ("Token hit ratio", percent(figures.token_hit_ratio), sources),
        (
            "Best possible",
            percent(figures.block_hit_ratio_max),
            "of blocks, in a shared cache that never evicts",
        ),
        ("Prompt tokens", count(tokens), f"{count(figures.missed_tokens)} computed"),
        (
            "Requests",
            count(figures.requests),
            f"not counted: {', '.join(aside)}" if aside else _looked_up(figures),
        ),
    )
    return (
        '<dl class="tiles">'
        + "".join(
            f'<div class="tile"><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>'
            for name, value, note in tiles
        )
        + "</dl>"
    )


def _looked_up(figures: Figures) -> str:
    """Raw look-ups are no requests: one that waits is looked up again and again."""
    if figures.beside.lookups == figures.requests:
        return f"over {duration(figures.span_s)}"
    return f"{count(figures.beside.lookups)} look-ups"


def _chart(chart: Chart | None, table: str, below: str = "") -> str:
    if chart is None:
        return ""
    legend = "".join(
        f'<li><span class="chip" style="background:var({colour})"></span>{escape(name)}</li>'
        for name, colour in chart.legend
    )
    listed = f'<ul class="legend">{legend}</ul>' if legend else ""
    return (
        f'<section id="{chart.name}"><h2>{escape(chart.heading)}</h2>'
        f"<p>{escape(chart.sentence)}</p>{listed}{chart.drawings}{below}"
        f"<details><summary>The numbers</summary>{table}</details></section>"
    )


def _causes(figures: Figures) -> str:
    missed = figures.missed_tokens
    if not missed:
        return ""
    items = []
    for line in sorted(figures.causes, key=lambda line: -line.tokens):
        if not line.tokens and not line.requests:
            continue
        share = line.tokens / missed
        more = f"{line.meaning}; where {named(line.requests, 'request')} stopped hitting"
        if line.cause == Cause.EVICTED and figures.evicted_from:
            tiers = ", ".join(f"{t} {count(n)}" for t, n in figures.evicted_from.items())
            more += f"; last evicted from: {tiers} tokens"
        css = "fill evicted" if line.cause == Cause.EVICTED else "fill"
        items.append(
            f'<li><span class="head"><strong>{CAUSE_NAMES[Cause(line.cause)]}</strong>'
            f"<span>{count(line.tokens)} tokens, {percent(share)}</span></span>"
            f'<span class="track"><span class="{css}" style="width:{100 * share:.2f}%"></span>'
            f'</span><span class="soft">{escape(more)}</span></li>'
        )
    return (
        '<section id="causes"><h2>Why tokens were computed</h2>'
        f"<p>{count(missed)} prompt tokens were no hits.</p>"
        f'<ul class="causes">{"".join(items)}</ul></section>'
    )


def _more(figures: Figures) -> str:
    if not figures.more:
        return ""
    bytes_each = figures.page_bytes
    rows = [
        (
            f"+{capacity(extra.extra_pages, bytes_each)}",
            capacity(extra.pages, bytes_each),
            percent(extra.block_hit_ratio),
            f"+{100 * (extra.block_hit_ratio - figures.present[-1].block_hit_ratio):.1f} points",
            count(extra.saved_tokens),
        )
        for extra in figures.more
    ]
    heads = ("more memory", "in all", "block hit ratio", "change", "tokens saved")
    return f"<h3>What more would give</h3>{_table(heads, rows)}"


def _tenants(figures: Figures) -> str:
    if not figures.tenants:
        return ""
    rows = [
        (
            line.tenant,
            count(line.requests),
            count(line.prompt_tokens),
            percent(line.token_hit_ratio),
            percent(line.block_hit_ratio),
            count(line.pages),
            count(line.evicted_tokens),
        )
        for line in figures.tenants
    ]
    heads = (
        "tenant", "requests", "prompt tokens", "token hits", "block hits", "new pages",
        "evicted tokens",
    )  # fmt: skip
    left_out = (
        f'<p class="soft">{figures.tenants_left_out} more are left out.</p>'
        if figures.tenants_left_out
        else ""
    )
    return f'<section id="tenants"><h2>Tenants</h2>{_table(heads, rows)}{left_out}</section>'


def _instances(figures: Figures) -> str:
    if not figures.instances:
        return ""
    sources = used_sources(figures)
    rows = [
        (
            line.instance,
            count(line.requests),
            count(line.prompt_tokens),
            percent(line.token_hit_ratio),
            *(count(getattr(line.hit_tokens, source)) for source in sources),
        )
        for line in figures.instances
    ]
    heads = ("scheduler", "requests", "prompt tokens", "token hits")
    named = tuple(SOURCE_NAMES[source] for source in sources)
    return f'<section id="instances"><h2>Schedulers</h2>{_table((*heads, *named), rows)}</section>'


def _over_time_table(figures: Figures) -> str:
    sources = used_sources(figures)
    return _table(
        ("from", "requests", "tokens", *(SOURCE_NAMES[s] for s in sources)),
        (
            (
                duration(bucket.at_s),
                count(bucket.requests),
                count(bucket.prompt_tokens),
                *(
                    percent(getattr(bucket.hit_tokens, s) / max(1, bucket.prompt_tokens))
                    for s in sources
                ),
            )
            for bucket in figures.over_time
        ),
    )


def _curve_table(figures: Figures) -> str:
    return _table(
        ("pages", "capacity", "block hit ratio"),
        (
            (
                count(point.pages),
                capacity(point.pages, figures.page_bytes),
                percent(point.block_hit_ratio, places=2),
            )
            for point in figures.curve
        ),
    )


def _distance_table(figures: Figures) -> str:
    reused = sum(bucket.pages for bucket in figures.reuse_distance)
    return _table(
        ("distance up to", "pages reused", "share"),
        (
            (f"{bucket.last:,}", count(bucket.pages), percent(bucket.pages / max(1, reused)))
            for bucket in figures.reuse_distance
        ),
    )


def _working_table(figures: Figures) -> str:
    names = list(figures.working_set[0].pages) if figures.working_set else []
    return _table(
        ("at", *names),
        (
            (duration(sample.at_s), *(count(sample.pages[name]) for name in names))
            for sample in figures.working_set
        ),
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="table"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _footer(figures: Figures) -> str:
    return (
        "<footer><p>Block hit ratio: whole blocks in hit prefixes / blocks, a partial last block "
        "included. Token hit ratio: hit tokens / prompt tokens. Retries, probes and "
        "recomputations after preemption count in neither. The curve is that of one LRU cache of "
        f"pages of {figures.page_tokens} tokens that all requests share, evicted leaf first. "
        "Definitions: docs/analytics.md.</p></footer>"
    )
