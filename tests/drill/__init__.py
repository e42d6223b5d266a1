"""Long drills: what a disk, a neighbour, a bad file or a lost shard can do to a run.

make drill
make drill DRILL_OPTIONS="--minutes 2 --only kills --seed 3"
"""
