"""One HTML page of one run or several, from what `status.history` reads; without torch.

columns        figures of log lines as arrays, and the points that a chart shows
findings       where the hours went, loss spikes, settings that differ
ranks          memory of each rank by phase; the rank that the others wait for
charts         which series go into which chart: the data of page.js and of --png
page           the page: page.html (Jinja2) with page.js, which draws the charts as SVG
"""
