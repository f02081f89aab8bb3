"""How far the walk through shapes goes. Read by joint.explore, joint.choice and joint.pricing."""

NEAR, NEARER = 1.2, 1.05
"""Factors on the fastest known step: neighbours are visited up to NEARER of it, starts up to NEAR; and so are the
neighbours of all shapes up to NEAR once what is best is refined, unless there are more than MANY_SHAPES."""

GAINED = 1.03
"""Factor on the fastest step that was solved to the end: a glance that is slower by more is not solved, of which the
exact solution and shifted cuts gain 1 to 2 %."""

FEW_SHAPES, MANY_SHAPES = 32, 100
"""A space of at most FEW_SHAPES is visited as a whole; of more than MANY_SHAPES fewer neighbours are (NEARER)."""

SCATTERED = 2  # results for which scattering gradients after every microbatch is tried, each as long as an exact one
HOPELESS = 0.4  # times the fastest known step: lower floors are hardly raised above it by a quick look
CLOSING = 0.3  # share of the time limit that is kept at most for the best result when others are visited or solved

SLOWER_STARTS = 2
"""After so many starts in a row, each slower than the one before and far from the best, no further start is visited; in
a probe also where each is faster, but by so little that none would come near."""
