"""A picture of speed against noise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

FLOOR = 1e-4
"""KL that a point without noise is drawn at: the axis is logarithmic."""

Point = tuple[str, float, float]
"""Name, tokens a second, mean KL in nats."""


def draw(points: Sequence[Point], path: Path) -> None:
    """Writes a PNG; points that nothing beats in both are joined by a line. Needs matplotlib."""
    import matplotlib as mpl  # of the benchmarks, the other sections do without

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    best = sorted((point for point in points if not is_beaten(point, points)), key=lambda point: point[1])
    axes.plot([point[1] for point in best], [point[2] for point in best], color="tab:blue", alpha=0.4, zorder=1)
    for name, speed, noise in points:
        beaten = is_beaten((name, speed, noise), points)
        axes.scatter([speed], [noise], s=60, color="tab:gray" if beaten else "tab:blue", zorder=2)
        axes.annotate(name, (speed, noise), xytext=(0, 9), textcoords="offset points", ha="center")
    axes.set(yscale="log", xlabel="tokens a second, 8 streams", ylabel="mean KL to FP32, nats per token")
    axes.set_title("Speed against noise, SmolLM2-135M")
    axes.margins(x=0.2, y=0.15)
    axes.grid(which="major", alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def is_beaten(point: Point, points: Sequence[Point]) -> bool:
    """Whether another point is at least as fast and as exact, and better in one of them."""
    _, speed, noise = point
    return any(other[1] >= speed and other[2] <= noise and (other[1], other[2]) != (speed, noise) for other in points)
