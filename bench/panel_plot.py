"""Plot with one panel per workload and one bar per contender; Cobox in blue."""

from xml.sax.saxutils import escape

from report import number

# Plot dimensions in pixels.
LABELS, BARS, VALUES, ROW, BAR, HEAD, PANEL_HEAD, PANEL_FOOT, FOOT, MARGIN = 300, 400, 170, 24, 15, 64, 34, 14, 34, 20
OURS, OTHERS, PALE = "#0969da", "#9198a1", "#59636e"


def panels(groups, title, subtitle):
    """Bars from zero to the median, with a thin line to the 99th percentile as far as it fits; shorter is better everywhere."""
    width = MARGIN * 2 + LABELS + BARS + VALUES
    height = HEAD + sum(PANEL_HEAD + ROW * len(g.measured()) + PANEL_FOOT for g in groups) + FOOT
    left = MARGIN + LABELS
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
           'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="13" fill="#1f2328">',
           f"<title>{escape(title)}</title>", f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
           f'<text x="{MARGIN}" y="26" font-size="16" font-weight="600">{escape(title)}</text>',
           f'<text x="{MARGIN}" y="46" fill="{PALE}">{escape(subtitle)}</text>']
    top = HEAD
    for group in groups:
        series = sorted(group.measured(), key=lambda s: s.median)
        most = max(s.median for s in series) * 1.05
        out.append(f'<text x="{MARGIN}" y="{top + 20}" font-weight="600">{escape(group.title.replace("`", ""))}</text>')
        top += PANEL_HEAD
        bottom = top + ROW * len(series)
        out.append(f'<line x1="{left}" x2="{left}" y1="{top}" y2="{bottom}" stroke="#d1d9e0"/>')
        for index, s in enumerate(series):
            middle, colour = top + ROW * index + ROW / 2, OURS if s.is_ours else OTHERS
            end, far = left + BARS * s.median / most, left + BARS * min(s.p99 / most, 1)
            out.append(f'<text x="{left - 10}" y="{middle + 4.5}" text-anchor="end">{escape(s.label)}</text>')
            out.append(f'<rect x="{left}" y="{middle - BAR / 2}" width="{max(end - left, 1):.1f}" height="{BAR}" rx="2" fill="{colour}"/>')
            if far > end:
                out.append(f'<line x1="{end:.1f}" x2="{far:.1f}" y1="{middle}" y2="{middle}" stroke="{colour}" stroke-width="2"/>')
            out.append(f'<text x="{max(end, far) + 8:.1f}" y="{middle + 4.5}" fill="{PALE}">{escape(group.value(s))}</text>')
        top = bottom + PANEL_FOOT
    out.append(f'<text x="{MARGIN}" y="{height - 14}" fill="{PALE}">shorter is better; a bar ends at the median, its line at the 99th '
               "percentile (cut at the panel's edge)</text>")
    out.append("</svg>")
    return "\n".join(out) + "\n"


class Group:
    """The measurements of one workload; `yardstick` is the key of the series that counts as 1."""

    def __init__(self, title, yardstick, unit_bytes=None, unit_requests=None, is_share=False, words=()):
        self.title, self.yardstick, self.unit_bytes, self.is_share, self.words = title, yardstick, unit_bytes, is_share, list(words)
        self.unit_requests = unit_requests
        self.series, self.why_not = {}, {}

    def measured(self):
        return [s for s in self.series.values() if s.times]

    def ratio(self, key, to=None, of=lambda s: s.median):
        """The time as a multiple of the yardstick's; None if one of the two is missing."""
        ours, other = self.series.get(key), self.series.get(to or self.yardstick)
        return of(ours) / of(other) if ours and other and ours.times and other.times else None

    def value(self, s):
        if self.unit_requests:
            return f"{self.unit_requests / s.median * 1e3:,.0f} a second"
        return f"{rate(self.unit_bytes, s.median)} MiB/s" if self.unit_bytes else f"{number(s.median)} ms"

    def table(self):
        name = self.series[self.yardstick].label if self.yardstick in self.series else "–"
        of = f"share of {name}" if self.is_share else f"× {name}"
        if self.unit_requests:
            rows = [f"| what | n | median, ms | p99, ms | requests a second | {of} |", "|---|--:|--:|--:|--:|--:|"]
        elif self.unit_bytes:
            rows = [f"| what | n | median, s | median, MiB/s | p99, s | {of} |", "|---|--:|--:|--:|--:|--:|"]
        else:
            rows = [f"| what | n | median, ms | p99, ms | {of} |", "|---|--:|--:|--:|--:|"]
        for key, s in self.series.items():
            if not s.times:
                rows.append(f"| {s.label} | – | not available: {self.why_not.get(key, 'not measured')} |" + " |" * (3 if self.unit_bytes or self.unit_requests else 2))
                continue
            ratio = self.ratio(key)
            told = "–" if ratio is None else f"{1 / ratio if self.is_share else ratio:.2f}"
            times = (f"{s.median / 1e3:.2f} | {rate(self.unit_bytes, s.median)} | {s.p99 / 1e3:.2f}" if self.unit_bytes
                     else f"{number(s.median)} | {number(s.p99)}")
            if self.unit_requests:
                times += f" | {self.unit_requests / s.median * 1e3:,.0f}"
            rows.append(f"| {s.label} | {len(s.times)} | {times} | {told} |")
        return "\n".join(rows)


def rate(unit_bytes, ms):
    return f"{unit_bytes / 2**20 / (ms / 1e3):.0f}"
