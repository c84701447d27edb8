"""How weights are coloured and axes labelled, in every picture and page alike. No torch.

Weights are drawn on one scale from 0 to 1, whatever the picture, so that pictures of two models can
be compared. Colours follow the square root of the weight: among a hundred sources most weights are
around a hundredth, which a linear scale would not tell from none.
"""

COLOUR_MAP = "viridis"
EXPONENT = 0.5
TICKS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
LEGEND = "weight (colours by its square root)"
# From this weight on, dark writing is the readable one.
LIGHT_FROM = 0.4


def labelled(count: int, most: int) -> range:
    """Which of ``count`` places of an axis get a label when only ``most`` labels have room.

    Steps are even, so that in full mode every label is of the same kind of sublayer.
    """
    step = 1
    while -(-count // step) > most:
        step += 1 if step == 1 else 2
    return range(0, count, step)
