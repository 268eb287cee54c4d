"""Speed and accuracy of engram against plain PyTorch, in one run on one machine: `python -m benchmarks.run`.

    shapes.py    sizes, token streams, tables on 4 KiB and 2 MiB pages
    works.py     what is measured: ours, its peers and limits for each op, checked against each other
    peers.py     what one would write without engram: eager, restructured ("smart"), the official demo's way, compiled
    limits.py    what the machine can do: copy, read, random rows, with limits.cpp
    timing.py    interleaved timing
    goals.py     what has to be reached, and whether a row does
    report.py    lines for the terminal, docs/benchmarks.md, comparison with an earlier run
    run.py       the command line
    sharded.py   sharded tables over loopback, by itself: `python -m benchmarks.sharded`
"""
