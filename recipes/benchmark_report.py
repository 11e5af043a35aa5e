# SPDX-License-Identifier: Apache-2.0
"""The benchmark's results for people: lines and Markdown tables."""

import math
from typing import Any


def quantity(value: float, unit: str) -> str:
    """A number with the prefix that leaves one to three digits before the point: 45.5 MFLOP."""
    power = min(max(int(math.log10(value)) // 3, 0), 4) if value > 0 else 0
    return f"{value / 1000**power:.4g} {['', 'k', 'M', 'G', 'T'][power]}{unit}"


def describe(row: dict[str, Any]) -> str:
    """A row of the results in words."""
    words = [f"{row['case']:>10} {row['part']}: {row['seconds']:.4g} s", f"{row['tokens_per_second']:,.0f} tokens/s"]
    if "anchors_per_second" in row:
        words.append(f"{row['anchors_per_second']:,.0f} anchors/s")
    if "share_of_product" in row:
        words.append(f"{quantity(1e12 * row['tflop'], 'FLOP')} at {row['share_of_product']:.1%} of the product's rate")
    if row["peak_memory_gb"] is not None:
        words.append(f"peak {row['peak_memory_gb']:.1f} GB")
    words += [f"first step {row['first_step_seconds']:.3g} s", f"{row['hours_per_epoch']:.4g} h/epoch"]
    if row.get("check"):
        check = row["check"]
        words.append(
            f"loss {check['loss']:.6f}, naive twin {check['naive_loss']:.6f} over {check['blocks']} blocks, gradients "
            f"within {max(check['relative_gradient_differences'].values()):.2g}"
            + ("" if check["within"] else f" (BEYOND {check['tolerances'][0]} of the loss, {check['tolerances'][1]})")
        )
    if "comparison" in row:
        found = row["comparison"]
        equal = ("equal" if found["equal"] else "NOT EQUAL") if found["comparable"] else "not comparable"
        words.append(
            f"loss {found['peer_loss']:.6f} against ours {found['loss']:.6f} ({equal}), gradients within "
            f"{max(found['relative_gradient_differences'].values()):.2g}"
        )
        words.append(f"ours takes {row['drafter_time_over_this']:.3f} of its time")
    if "target_time_over_this" in row:
        words.append(
            f"the target takes {row['target_time_over_this']:.3f} of its time, features within "
            f"{row['feature_difference']:.2g}"
        )
    if "against" in row:
        words.append(_against(row["against"]))
    if "optimizer_adds" in row:
        words.append(
            f"the optimizer adds {row['optimizer_adds']:.1%} ({row['optimizer_adds_seconds']:.3g} s) and holds "
            f"{quantity(row['optimizer_state_bytes'], 'B')}"
        )
    if "gb_per_second" in row:
        words.append(f"{row['gb_per_second']:.3g} GB/s")
    return ", ".join(words)


def _against(found: dict[str, Any]) -> str:
    """Another way to take the step against the first one."""
    gradients = ", ".join(f"{name} {value:.2g}" for name, value in found["relative_gradient_differences"].items())
    memory = found.get("more_peak_memory_gb")
    return (
        f"{found['time_ratio']:.3f} of the time of {found['name']}"
        + ("" if memory is None else f" with {memory:+.1f} GB")
        + f"; loss {found['loss']:.6f} against {found['reference_loss']:.6f}, relative difference "
        f"{found['relative_loss_difference']:.2g}, of gradients: {gradients}"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| tokens | anchors | part | time | tokens/s | anchors/s | per anchor | of product | peak memory | h/epoch |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        anchors = row.get("anchors_per_second")
        share, memory = row.get("share_of_product"), row["peak_memory_gb"]
        cells = [
            f"{row['num_tokens']:,}",
            f"{row['num_anchors']:,}",
            row["part"],
            f"{row['seconds']:.4g} s",
            f"{row['tokens_per_second']:,.0f}",
            f"{anchors:,.0f}" if anchors else "",
            f"{1e3 / anchors:.3g} ms" if anchors else "",
            f"{share:.1%}" if share is not None else "",
            f"{memory:.1f} GB" if memory is not None else "",
            f"{row['hours_per_epoch']:.4g}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def profile_table(profiled: dict[str, Any]) -> str:
    """Seconds by group and by kernel, as Markdown tables."""
    groups = profiled["seconds_by_group"]
    total = sum(groups.values())
    lines = ["| group | ms | share |", "|---|---:|---:|"]
    lines += [f"| {name} | {1e3 * s:.2f} | {s / total:.1%} |" for name, s in groups.items()]
    lines += ["", "| kernel | group | calls | ms | share |", "|---|---|---:|---:|---:|"]
    for kernel in profiled["kernels"]:
        name = kernel["name"].replace("|", "\\|")[:100]
        seconds = kernel["seconds"]
        lines.append(
            f"| {name} | {kernel['group']} | {kernel['calls']} | {1e3 * seconds:.3f} | {seconds / total:.1%} |"
        )
    return "\n".join(lines)
