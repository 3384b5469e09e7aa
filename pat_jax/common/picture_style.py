"""The style of all pictures: colours, and the label of those that were not measured."""

COMPUTED = "computed, not measured"  # in a picture of a plan or a replay

# Colour-blind people can tell them apart (Okabe and Ito 2008), on white and on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f7f7f")


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def tp_colour(tp: int) -> str:
    """Returns the colour of layouts with this TP degree, the same in every picture. It depends on
    the degree's number of prime factors, as each wider layout adds a mesh axis."""
    count = 0
    factor = 2
    while tp > 1:
        if tp % factor:
            factor += 1
        else:
            tp = tp // factor
            count = count + 1
    return colour(count)


def layout_colour(name: str) -> str:
    """Returns the colour of a layout by its name, such as `dp2tp4`."""
    return tp_colour(int(name.rpartition("tp")[2]))
