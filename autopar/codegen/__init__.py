"""From a graph and a Plan to the Python source of the sharded module. Called by `compile`, the command line and
autopar.verify; knows nothing of the search.

    module, stages            the emitted file: classes of blocks, stages and the model
    scope, placements, order  the forward of one class
    tables                    its tables of parameters, inputs and outputs
    expressions, algorithms   the text of one operator
    turns, sizes, reserved    arguments, sizes and names
    edges                     the reshards of a plan, also for prices, checks and reports
    tally                     how often each operator and reshard runs, also for checks
    context, probes           what all writers share; calls that report every value
"""
