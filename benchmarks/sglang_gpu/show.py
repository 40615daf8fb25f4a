"""The results of all groups as tables, one kind of group each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.report import table
from benchmarks.sglang_gpu.rows import LONG, judged

QUANTILES = ("p50_ms", "p90_ms", "p99_ms", "longest_ms", "mean_ms")


def show(folder: Path) -> str:
    """Tables of every result in a folder, and what went wrong."""
    results: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and "ok" in found:
            results[path.stem] = found
    parts = [
        _exact({n: r for n, r in results.items() if "digests" in r and "daemon" in r}),
        _ids({n: r for n, r in results.items() if "stock_differs_from_itself" in r}),
        _kills({n: r for n, r in results.items() if "engine_memory" in r}),
        *(_ttft(n, r) for n, r in results.items() if "lengths" in r),
        *(_rows(n, r) for n, r in results.items() if "rows" in r),
        *(_loaded(n, r) for n, r in results.items() if "turns" in r),
        *(_busy_wait(n, r) for n, r in results.items() if "busy_wait_us" in r),
        *(
            f"{n}: {r['error']}\n{r.get('traceback', '')}"
            for n, r in results.items()
            if "error" in r
        ),
    ]
    return "\n\n".join(part for part in parts if part)


def _ok(result: dict[str, Any]) -> str:
    return "ok" if result["ok"] else "NOT OK"


def _exact(results: dict[str, dict[str, Any]]) -> str:
    if not results:
        return ""
    rows = []
    for name, result in results.items():
        digests = result["digests"]
        by = "; ".join(f"{count:,} {way}" for way, count in sorted(digests["by"].items()))
        rows.append(
            [
                name, _ok(result), f"{result['requests']:,} / {result['failed_count']}",
                f"{digests['compared']:,}", digests["wrong"], digests["unknown"], by,
                f"{result['cached_tokens']:,} of {result['prompt_tokens']:,}",
                f"{result['daemon'].get('pool_pages_evicted', 0):,}", result["seconds"],
            ]
        )  # fmt: skip
    columns = ["group", "", "requests / failed", "pages compared", "differ", "unknown",
               "of them", "cached tokens", "pages evicted", "s"]  # fmt: skip
    return table(columns, rows)


def _ids(results: dict[str, dict[str, Any]]) -> str:
    if not results:
        return ""
    rows = [
        [
            name, _ok(result), result["prompts"], result["stock_differs_from_itself"],
            str(result["visits"]), str(result["differing"]),
            str(result["stock_radix"]["differing"]), f"{result['differing_share']:.3f}",
            f"{result['stock_radix']['differing_share']:.3f}",
            result["digests"]["ambiguous"], f"{result['digests']['compared']:,}",
            result["digests"]["wrong"],
        ]
        for name, result in results.items()
    ]  # fmt: skip
    columns = ["group", "", "prompts", "stock differs", "visits (stock agrees)", "differ",
               "differ, stock's own cache", "share that differs, all",
               "stock's own cache", "keys with several digests", "pages compared",
               "differ"]  # fmt: skip
    return table(columns, rows)


def _kills(results: dict[str, dict[str, Any]]) -> str:
    if not results:
        return ""
    rows = [
        [
            name, _ok(result), result["requests"], result["failed_count"],
            result["failed_with_503"], result["loads_lost_in_flight"],
            result["shares_again_after_s"], result["engine_memory"]["back_s"],
            f"{result['engine_memory']['bytes']:,}", f"{result['digests']['compared']:,}",
            result["digests"]["wrong"],
        ]
        for name, result in results.items()
    ]  # fmt: skip
    columns = ["group", "", "requests", "failed", "with 503", "loads lost in flight",
               "shares again, s", "memory back, s", "bytes", "pages compared",
               "differ"]  # fmt: skip
    return table(columns, rows)


def _ttft(name: str, result: dict[str, Any]) -> str:
    rows: list[list[object]] = []
    columns: list[str] = []
    for length, row in result["lengths"].items():
        figures = {k: v for k, v in row.items() if isinstance(v, dict) and "cached" not in k}
        columns = list(figures)
        cells = [
            f"{v['median_ms']} ({row[f'{k}, cached tokens']['median_ms']:.0f})"
            for k, v in figures.items()
        ]
        rows.append([length, *cells])
        rows.extend([f"miss: {miss}", *([""] * len(cells))] for miss in row["misses"])
    heading = f"{name} ({_ok(result)}): ms (cached tokens), medians"
    return f"{heading}\n{table(['tokens', *columns], rows)}"


def _rows(name: str, result: dict[str, Any]) -> str:
    """Medians, and each ratio with its bound."""
    columns = list(dict.fromkeys(c for row in result["rows"].values() for c in row))
    cells = [
        [length, *(row.get(column, {}).get("median_ms", "") for column in columns)]
        for length, row in result["rows"].items()
    ]
    judgements = {
        length: result.get("ratios", {}).get(length)  # a run that was cut off has none of its last
        or judged({name: found["ms"] for name, found in row.items()}, long=int(length) >= LONG)
        for length, row in result["rows"].items()
    }
    ratios = [
        [
            length,
            what,
            f"{r['ratio']:.3f}",
            f"{r['upper']:.3f}",
            f"{r['of_medians']:.3f} ({r['upper_of_medians']:.3f})" if "of_medians" in r else "",
            str(r["goal"]),
            r["pairs"],
            "" if r["ok"] else "missed",
        ]
        for length, row in judgements.items()
        for what, r in row.items()
    ]
    heads = ["tokens", "ratio", "", "upper 95 %", "of medians (upper)", "goal", "pairs", ""]
    missed = "".join(f"\nmiss: {miss}" for miss in result.get("misses", []))
    heading = f"{name} ({_ok(result)}): ms, medians"
    missed += f"\n{_digests(result)}" if "digests" in result else ""
    return f"{heading}\n{table(['tokens', *columns], cells)}\n{table(heads, ratios)}{missed}"


def _busy_wait(name: str, result: dict[str, Any]) -> str:
    """Each round of both, and what the wait makes of them."""
    rows = [
        [wait_us, n, f"{one['requests_per_s']:.2f}", one["ttft_ms_mean"], one["cached_tokens"]]
        for wait_us, rounds in result["busy_wait_us"].items()
        for n, one in enumerate(rounds, 1)
    ]
    heads = ["waits us", "round", "requests/s", "TTFT ms, mean", "cached tokens"]
    found = [table(heads, rows), str(result.get("factors", {})), str(result.get("counters", {}))]
    return "\n".join([f"{name} ({_ok(result)})", *found])


def _digests(result: dict[str, Any]) -> str:
    """What was compared in a run that is not timed, of one tree or of several by name."""
    found = result["digests"]
    trees = {"": found} if "compared" in found else found
    return "\n".join(
        f"{name + ': ' if name else ''}{one['compared']:,} pages compared, {one['wrong']} differ, "
        f"{one['unknown']} unknown"
        for name, one in trees.items()
    )


def _verdict(one: dict[str, Any]) -> str:
    """On gaps beside another system's."""
    if unlike := one.get("not comparable"):
        return "; ".join(["not comparable", *unlike])
    if "goal" not in one:
        return ""
    return {True: "met", False: "missed", None: "no verdict"}[one.get("ok")]


def _loaded(name: str, result: dict[str, Any]) -> str:
    """Conversations, gaps between tokens, and costs."""
    rounds = [
        [system, n, f"{one['requests_per_s']:.2f}", one["ttft_ms_mean"], one["ttft_ms_mean_later"],
         f"{one['cached_tokens']:,} of {one['prompt_tokens']:,}", len(one["failed"])]
        for system, found in result["turns"].items()
        for n, one in enumerate(found, 1)
    ]  # fmt: skip
    gaps = [
        [system, phase, *(f"{one[k]:.2f}" if k in one else "" for k in QUANTILES), one["gaps"],
         one["asked"], one.get("left_out", ""),
         *(one.get("bus", {}).get(way, "") for way in ("restored", "backed_up")),
         *(" / ".join(map(str, of)) for of in one.get("answers_ms", ([], [])))]
        for system, found in result.get("gaps", {}).items()
        for phases in found
        for phase, one in phases.items()
    ]  # fmt: skip
    judgements = [
        [ours, theirs, phase,
         *(f"{one[k]:.3f}" if k in one else "" for k in ("p50", "p99", "goal")),
         one.get("asked more", ""),
         " and ".join(map(str, one.get("left out", []))), one.get("passes", ""), _verdict(one)]
        for ours, beside in result.get("gap_ratios", {}).items()
        for theirs, phases in beside.items()
        for phase, one in phases.items()
    ]  # fmt: skip
    heads = ["system", "round", "requests/s", "TTFT ms, mean", "of later turns", "cached", "failed"]
    parts = [f"{name} ({_ok(result)}): conversations", table(heads, rounds)]
    parts += [str(result.get("factors", {})), f"pace: {result.get('pace', '')}"]
    parts.append("gaps between tokens, ms")
    heads = ["system", "beside", "p50", "p90", "p99", "longest", "mean", "gaps", "asked",
             "left out", "bus from the host", "bus to it", "kept ones answered: p50 / p99",
             "new ones"]  # fmt: skip
    parts.append(table(heads, gaps))
    heads = ["gaps of", "times those of", "beside", "p50", "p99", "goal", "asked more", "left out",
             "its p99 in passes", ""]  # fmt: skip
    parts.append(table(heads, judgements))
    if "digests" in result:
        parts.append(_digests(result))
    costs = [str(result.get(name, {})) for name in ("cost", "gaps_cost", "absent")]
    return "\n".join([*parts, *costs])
