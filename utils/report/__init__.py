"""One HTML page of one run or several, from what run directories hold; without torch.

history        the files of a run directory: its starts, what each logged, what was done again
findings       how a run ended, where the hours went, loss spikes, settings that differ
charts         which series go into which chart, thinned out; the same for --png by matplotlib
page           the page: page.html (Jinja2) with page.js, which draws the charts as SVG
"""
