"""Formats measured times as a table and a plot."""

import math
import os
import pathlib
import statistics
from xml.sax.saxutils import escape


class Series:
    """The times of one contender, in milliseconds."""

    def __init__(self, key, label, is_ours=False):
        self.key, self.label, self.is_ours, self.times = key, label, is_ours, []

    @property
    def median(self):
        return statistics.median(self.times)

    @property
    def p95(self):
        return self.below(0.95)

    @property
    def p99(self):
        return self.below(0.99)

    def below(self, share):
        """The time below which this share of the measurements lies, by nearest rank."""
        return sorted(self.times)[max(0, math.ceil(len(self.times) * share) - 1)]


def machine():
    cpuinfo = pathlib.Path("/proc/cpuinfo").read_text()
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")), os.uname().machine)
    memory = int(pathlib.Path("/proc/meminfo").read_text().split()[1]) / 2**20
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB; Linux {os.uname().release}"


def number(ms):
    return f"{ms:.3f}" if ms < 0.1 else f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"


def table(series, yardstick):
    """A Markdown table; the yardstick's median is 1×."""
    rows = ["| what | rounds | median, ms | p95, ms | × bwrap |", "|---|--:|--:|--:|--:|"]
    for s in series:
        ratio = f"{s.median / yardstick.median:.2f}" if yardstick else "–"
        rows.append(f"| {s.label} | {len(s.times)} | {number(s.median)} | {number(s.p95)} | {ratio} |")
    return "\n".join(rows)


# Plot dimensions in pixels.
LABELS, BARS, ROW, BAR, HEAD, FOOT, MARGIN = 270, 530, 34, 18, 64, 58, 20


def plot(series, title, subtitle):
    """Bars on a logarithmic scale: the bar ends at the median, the thin line at the 95th percentile."""
    low = 10 ** math.floor(math.log10(min(s.median for s in series)))
    high = 10 ** math.ceil(math.log10(max(s.p95 for s in series) * 1.3))
    span = math.log10(high / low)
    left, width, height = MARGIN + LABELS, MARGIN * 3 + LABELS + BARS, HEAD + ROW * len(series) + FOOT
    bottom = HEAD + ROW * len(series)

    def x(ms):
        return left + BARS * math.log10(max(ms, low) / low) / span

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
           'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="13" fill="#1f2328">',
           f"<title>{escape(title)}</title>", f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
           f'<text x="{MARGIN}" y="26" font-size="16" font-weight="600">{escape(title)}</text>',
           f'<text x="{MARGIN}" y="46" fill="#59636e">{escape(subtitle)}</text>']
    decade = low
    while decade <= high * 1.001:
        out.append(f'<line x1="{x(decade):.1f}" x2="{x(decade):.1f}" y1="{HEAD}" y2="{bottom}" stroke="#d1d9e0"/>')
        out.append(f'<text x="{x(decade):.1f}" y="{bottom + 18}" text-anchor="middle" fill="#59636e">{decade:g} ms</text>')
        decade *= 10
    out.append(f'<text x="{left + BARS / 2:.1f}" y="{bottom + 40}" text-anchor="middle" fill="#59636e">'
               "logarithmic; a bar ends at the median, its line at the 95th percentile</text>")
    for index, s in enumerate(series):
        middle = HEAD + ROW * index + ROW / 2
        colour = "#0969da" if s.is_ours else "#9198a1"
        out.append(f'<text x="{left - 10}" y="{middle + 4.5}" text-anchor="end">{escape(s.label)}</text>')
        out.append(f'<rect x="{left}" y="{middle - BAR / 2}" width="{x(s.median) - left:.1f}" height="{BAR}" rx="2" fill="{colour}"/>')
        out.append(f'<line x1="{x(s.median):.1f}" x2="{x(s.p95):.1f}" y1="{middle}" y2="{middle}" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="{x(s.p95) + 6:.1f}" y="{middle + 4.5}">{number(s.median)} ms</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"
