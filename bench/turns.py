#!/usr/bin/env python3
"""turns.py -- a model of the turns in which blocks of the Hopper backward add to dQ; ranks ways to take them

A block has 128 keys of one head. Its consumers make one tile of dQ after another, each in TILE microseconds. One thread
hands a tile to TMA, which adds it in global memory, when the block before has released the tile (docs/kernels.md). The
model follows these times, with jitter, over all blocks of a call on 132 processors, and prints a table: the time of the
whole call above that of its products alone, in percent.

The ways:

  one slot   one buffer of dQ; the thread waits until the sum is in memory, releases the tile, asks for the next turn
  two slots  the same with two buffers
  early      two slots; the next turn is asked for while a sum is on its way
  late       early, and a tile is released behind the sum of the next one: sums overlap, releases come later
  if ready   early; the next tile goes first only where it and its turn are already there
  given      as if ready; but a slot is given back with the turn of its tile, and nobody waits for reads
  shifted    every block begins with another tile: needs all blocks of a call on processors at once, and an order of
             additions of its own (full masks with few heads alone)

All but the last two give a slot back as soon as TMA has read it. The wait for that (cp.async.bulk.wait_group.read) and the
wait for the sum are the same machine instruction, so a device may let both end with the sum. Then the thread stands still
for a whole hop in every tile: the column `if ready, whole`. The way `given` has no such wait, and is the same under either
reading.

HOP is the time from handing a tile to TMA until its sum is in memory: guesses of 1 to 3 microseconds, where an H200 shows
some 0.4 (docs/results_gpu.md). The others are guesses of the same kind. No figure here is one of a device.
"""

import heapq
import random

PROCESSORS = 132
TILE = 1.7       # us: products of a tile at head dim 128, at the bound of docs/kernels.md
READ = 0.4       # TMA has read the buffer
ASK = 0.7        # a load from another processor's line
JITTER = 0.15    # of a tile, uniform
EDGE = 3.0       # begin and end of a block
WAYS = ['one slot', 'two slots', 'early', 'late', 'if ready', 'if ready, whole', 'given']


class Block:
    """Times of one block; `before` is the block that adds before it to each tile, or None."""

    def __init__(self, begin, tiles, before, way, hop, rng):
        slots = 1 if way == 'one slot' else 2
        early = way not in ('one slot', 'two slots')
        self.released = {}
        made, free = begin, begin        # consumers; the thread
        empty = [begin] * slots          # when a slot may be written
        flying = None                    # a tile whose release is still open, and when its sum is there
        for i, tile in enumerate(tiles):
            made = max(made + TILE * rng.uniform(1 - JITTER, 1 + JITTER), empty[i % slots])
            waits = before and tile in before.released
            ours = before.released[tile] if waits else begin
            if way == 'if ready, whole':
                # the sum before is there, but its turn is given on behind the next question
                asked = free + (ASK if waits else 0)
                if flying and not (ours <= free and made <= asked):
                    self.released[flying[0]] = asked
                    flying = None
                gone = max(asked if ours <= free else max(asked, ours) + ASK, made)
                free = empty[i % slots] = gone + hop
                if flying:
                    self.released[flying[0]] = free
                flying = (tile, free)
                continue
            ready = max(ours, made) <= free + ASK
            if flying and (way != 'late') and not (way in ('if ready', 'given') and ready):
                asked, free = free, max(free, flying[1])
                self.released[flying[0]] = free
                if way == 'given':
                    empty[(i - 1) % slots] = free
                flying = None
            else:
                asked = free
            # a turn that came before the question was asked costs nothing where the answer comes under a sum
            seen = max(ours, free) + ASK if not early else max(free, asked + ASK, ours + ASK if ours > asked else 0)
            gone = free = max(seen, made)
            empty[i % slots] = gone + (hop if way == 'given' else READ)
            if flying:
                self.released[flying[0]] = max(flying[1], gone)
                if way == 'given':
                    free = empty[(i - 1) % slots] = max(flying[1], gone)
            flying = (tile, gone + hop)
        self.released[flying[0]] = flying[1]
        self.end = flying[1] + EDGE


def tiles_of(block, blocks, causal):
    """Tiles of 64 queries, last to first; a causal block begins at its own keys."""
    return range(2 * blocks - 1, 2 * block - 1 if causal else -1, -1)


def call(blocks, heads, causal, way, hop):
    """Seconds of a call: blocks in the order of their tickets, each on the processor that is free first."""
    rng = random.Random(1)
    processors, before = [0.0] * PROCESSORS, [None] * heads
    for ticket in range(blocks * heads):
        block, head = divmod(ticket, heads)
        begin = heapq.heappop(processors) + EDGE
        before[head] = Block(begin, tiles_of(block, blocks, causal), before[head], way, hop, rng)
        heapq.heappush(processors, before[head].end)
    return max(processors)


def shifted(blocks, heads, hop):
    """The same of a full mask where step i of block b is tile b + i: block b + 1 has added to it a step before."""
    if blocks * heads > PROCESSORS:
        return None
    rng = random.Random(1)
    tiles, release = 2 * blocks, {}
    made = [[EDGE] * 2 for _ in range(blocks)]  # the last two tiles, for slots
    free = [EDGE] * blocks
    for i in range(tiles):
        for b in range(blocks):
            tile = (2 * b + i) % tiles
            begin = max(made[b][1], free[b] - TILE)  # two slots: at most one tile ahead of the thread
            made[b] = [made[b][1], begin + TILE * rng.uniform(1 - JITTER, 1 + JITTER)]
            ours = release.get(tile, (-2, 0.0))
            gone = max(made[b][1], free[b], ours[1] + ASK if ours[0] < i else 0.0)
            release[tile], free[b] = (i, gone + hop), gone + hop
    return max(free) + EDGE


def least(blocks, heads, causal):
    """Products alone, shared out evenly; no less than the longest block."""
    work = [len(tiles_of(block, blocks, causal)) * TILE + 2 * EDGE for block in range(blocks)]
    return max(sum(work) * heads / PROCESSORS, max(work))


def main():
    print('| tokens, heads, mask | hop, µs | ' + ' | '.join(WAYS) + ' | shifted |\n' + '|---' * (len(WAYS) + 3) + '|')
    for blocks, heads in ((128, 1), (128, 8), (128, 32), (256, 4)):
        for causal in (False, True):
            for hop in (1.0, 2.0, 3.0):
                floor = least(blocks, heads, causal)
                row = [call(blocks, heads, causal, way, hop) for way in WAYS]
                row.append(None if causal else shifted(blocks, heads, hop))
                print(f'| {blocks // 8}k, {heads}, {"causal" if causal else "full"} | {hop:.0f} | '
                      + ' | '.join('-' if x is None else f'{100 * (x / floor - 1):.0f} %' for x in row) + ' |')


if __name__ == '__main__':
    main()
