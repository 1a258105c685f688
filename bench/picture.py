"""picture.py -- the look of all pictures: a grid of panels over one axis, the legend at the right

    draw(path, title, [[Panel('forward', curves)]], legend)

A curve is (points, colour, dashes), and perhaps a marker, with (x, y) as points; one without points is left out. What
the legend lists is (label, colour, dashes) likewise. Without Matplotlib nothing is drawn, and that is said.
"""

import common

SOLID, DASHED, DOTTED = '-', (0, (4, 2)), (0, (1, 2))
GREY, BLACK = '#555555', 'black'


class Panel:
    """A panel: its curves, levels (y, dashes) across it, labels of its axes; x by powers of two, unless linear.
    `more` is called with the axes at the end."""

    def __init__(self, title, curves=(), *, x='', y='', levels=(), linear=False, log_y=False, more=None):
        self.title, self.curves, self.x, self.y = title, [curve for curve in curves if curve[0]], x, y
        self.levels, self.linear, self.log_y, self.more = levels, linear, log_y, more


def pyplot():
    """Matplotlib's pyplot for files; None, and said so, where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        common.log('left out: the chart, as Matplotlib is not installed')
        return None
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    return plt


def tidy(axes, axis='y'):
    """The look that all panels share; lines across this axis."""
    axes.grid(axis=axis, color='#dddddd', linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ('top', 'right'):
        axes.spines[side].set_visible(False)


def save(figure, path):
    figure.savefig(path, dpi=110, metadata={'Software': None})
    common.log(f'chart: {path}')


def fill(axes, panel, bold, tick):
    for points, colour, dashes, *marker in panel.curves:
        axes.plot(*zip(*sorted(points)), color=colour, linestyle=dashes, linewidth=2 if colour == bold else 1.3,
                  marker=marker[0] if marker else 'o', markersize=3)
    for level, dashes in panel.levels:
        axes.axhline(level, color=BLACK, linewidth=0.8, linestyle=dashes)
    if panel.curves and not panel.linear:
        ticks = sorted({x for curve in panel.curves for x, _ in curve[0]})
        axes.set_xscale('log', base=2)
        axes.set_xticks(ticks[::1 + len(ticks) // 8], map(tick, ticks[::1 + len(ticks) // 8]))
    if panel.log_y:
        axes.set_yscale('log')
    axes.set_title(panel.title, fontsize=10)
    tidy(axes)


def finish(axes, panel):
    """When all panels have their curves, as a limit holds for those that share the axis."""
    if not panel.log_y:
        axes.set_ylim(bottom=0)
    if panel.more:
        panel.more(axes)


def draw(path, title, grid, legend, *, share=('all', 'all'), size=(3.4, 3), margin=1.2, bold=None, tick=common.amount):
    """`share`: Matplotlib's sharex and sharey. `margin`: inches of the legend. `bold`: the colour of wider lines."""
    plt = pyplot()
    if plt is None:
        return
    wide, high = size[0] * len(grid[0]) + margin + 0.4, size[1] * len(grid) + 0.8
    figure, axes = plt.subplots(len(grid), len(grid[0]), figsize=(wide, high), squeeze=False,
                                sharex=share[0], sharey=share[1])
    for i, panels in enumerate(grid):
        for j, panel in enumerate(panels):
            fill(axes[i][j], panel, bold, tick)
            # once for all panels that have it
            axes[i][j].set_xlabel(panel.x if i + 1 == len(grid) or panel.x != grid[i + 1][j].x else '')
            axes[i][j].set_ylabel(panel.y if j == 0 or panel.y != panels[j - 1].y else '')
    for places, panels in zip(axes, grid):
        for place, panel in zip(places, panels):
            finish(place, panel)
    if legend:
        handles = [plt.Line2D([], [], color=colour, linestyle=dashes, marker=marker[0] if marker else None,
                              markersize=3.5) for _, colour, dashes, *marker in legend]
        figure.legend(handles, [entry[0] for entry in legend], loc='center right', frameon=False, fontsize=9,
                      handlelength=3)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout(rect=(0, 0, 1 - margin / wide, 1))
    save(figure, path)
