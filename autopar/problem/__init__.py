"""From a captured graph, a mesh and prices to a Problem of numbers, and from its solution back to decisions for the
graph. Called by the planner, by autopar.joint for the stages of pipelines, and by whatever prices or checks a plan.

    graph into Ops
        read_graph, graph       Program: one Op per node of the graph
        gradients, traffic,
        derivatives             what the Ops need beside: which values have gradients, bytes that kernels move
        original_names          original names of what blocks hold
        view_ops                which operators return views
    choices
        options, tiling         what each Op can do on one mesh axis
        clusters                groups of Ops with one choice, and their joint options
        branches, lanes         parts that may work side by side
        at_rest, pairs          layouts of parameters; of a value with its gradient
    prices on one mesh
        kernels, op_algorithms  operators on shards
        routes, layout_pairs    reshards
        prices                  both, and updates; step_shares: of one microbatch, and of what happens once per step
        settings                what is trained and how
    the Problem
        types                   Problem, Solution, Cost
        build, nets             a Problem of Ops and prices, and back; cluster_members, saved, kept_bytes and
                                operand_copies: its bytes
        presolve                a smaller Problem with the same optimum
    blocks that run again in the backward
        rerun, remat            what runs again; the Problem with it
        remat_frontier,
        remat_choices           which results to keep
        frontier_descent        the fastest of these, few of them priced
        cadence                 choices that scatter gradients after every microbatch
        separable               choices whose backward zero-bubble schedules can split
    tables for bounds and for local search (pipeline.passes, as sums over nodes and nets)
        pass_tables, pass_quantities, net_seconds, leaf_gathers, hiding
    without a search
        time_floor, memory_floor, largest
"""
