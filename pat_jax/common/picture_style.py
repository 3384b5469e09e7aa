"""What all pictures have in common: colours, and the words of those that no clock has seen."""

COMPUTED = "computed, not measured"  # in a picture of a plan or a replay

# Told apart by the colour-blind (Okabe and Ito 2008), on white and on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f7f7f")


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def tp_colour(tp: int) -> str:
    """The colour of layouts with that TP degree, the same in every picture. It follows from the
    number of its prime factors: each wider layout of a mesh takes another axis."""
    count, factor = 0, 2
    while tp > 1:
        if tp % factor:
            factor += 1
        else:
            tp, count = tp // factor, count + 1
    return colour(count)


def layout_colour(name: str) -> str:
    """The same of a layout's name, such as `dp2tp4`."""
    return tp_colour(int(name.rpartition("tp")[2]))
