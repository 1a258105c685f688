#!/usr/bin/env python3
"""check_turns.py -- the turns of attention's backward on GPUs, in every interleaving of its steps

Blocks of keys add to dQ of a tile of queries in the order of their numbers, whatever runs when: upi_cuda_bwd90_sum in
upipe/cuda/upipe_cuda_attn_bwd90.h (sums of bulk copies, two slots, the next turn asked for while a sum is on its way) and
upi_cuda_attn_bwd_add in upipe_cuda_attn_bwd.h. The model has their steps, the consumers that fill the slots, and what the
memory model leaves open: a bulk operation reads its slot and reaches memory whenever it likes between the fence before it
and the wait for it, two of them in either order; a store of the older kernels at any time before its fence. All reachable
states are searched. In each, sums come in order, each from its own tile; no state is without a way on, with as few blocks
resident as may be. Then each planted bug must be found.

The model is written by hand after the code; it says nothing about what the compiler makes of it.
"""

import sys


class Wrong(Exception):
    pass


class Model:
    """covers: the tiles [first, end) of each block; end does not fall. resident: blocks that run at a time."""

    def __init__(self, covers, resident, slots=2, bug=''):
        self.covers, self.resident, self.slots, self.bug = covers, resident, slots, bug
        self.tiles = max(end for _, end in covers)
        self.order = [[b for b, (first, end) in enumerate(covers) if first <= m < end] for m in range(self.tiles)]

    def is_first(self, block, tile):
        return block == 0 or tile >= self.covers[block - 1][1]

    def tile_of(self, block, n):
        return self.covers[block][1] - 1 - n  # queries down

    def count(self, block):
        return self.covers[block][1] - self.covers[block][0]

    # A state is (blocks, turns, sums). A block is None before it has begun, 'end' after it, else a tuple:
    #   at       the next step of the thread that sums
    #   n        the number of its tile;  mine: it has the turn;  before: the tile whose sum is on its way, or -1
    #   filled   tiles that the consumers have written;  emptied: those whose slot they may write again
    #   slots    the number of the tile in each slot
    #   flying   operations (tile, number, what was read, or -1), not in memory yet
    NEW = ('poll', 0, False, -1, 0, 0, (-1, -1), ())

    def begin(self):
        return ((None,) * len(self.covers), (0,) * self.tiles, ((),) * self.tiles)

    def tickets(self):
        blocks = range(len(self.covers))
        return reversed(blocks) if self.bug == 'tickets fall' else blocks

    def next_states(self, state):
        blocks, turns, sums = state
        running = sum(isinstance(b, tuple) for b in blocks)
        for block in self.tickets():
            if blocks[block] is None:
                if running < self.resident:
                    yield self.replaced(state, block, self.NEW)
                break
        for block, own in enumerate(blocks):
            if isinstance(own, tuple):
                yield from self.consumers(state, block, own)
                yield from self.flight(state, block, own)
                yield from self.thread(state, block, own)

    @staticmethod
    def replaced(state, block, own, turn=None, added=None):
        blocks, turns, sums = state
        blocks = blocks[:block] + (own,) + blocks[block + 1:]
        if turn is not None:
            tile, more = turn
            turns = turns[:tile] + (turns[tile] + more,) + turns[tile + 1:]
        if added is not None:
            tile, entry = added
            sums = sums[:tile] + (sums[tile] + (entry,),) + sums[tile + 1:]
        return blocks, turns, sums

    def consumers(self, state, block, own):
        at, n, mine, before, filled, emptied, slots, flying = own
        free = filled - emptied < self.slots or self.bug == 'slots are not waited for'
        if filled < self.count(block) and free:
            slot = filled % self.slots
            slots = slots[:slot] + (filled,) + slots[slot + 1:]
            yield self.replaced(state, block, (at, n, mine, before, filled + 1, emptied, slots, flying))

    def flight(self, state, block, own):
        at, n, mine, before, filled, emptied, slots, flying = own
        for i, (tile, number, read) in enumerate(flying):
            if read < 0:
                rest = flying[:i] + ((tile, number, slots[number % self.slots]),) + flying[i + 1:]
                yield self.replaced(state, block, (at, n, mine, before, filled, emptied, slots, rest))
            else:
                done = len(state[2][tile])
                if self.order[tile][done:done + 1] != [block]:
                    raise Wrong(f'block {block} adds to tile {tile} in place {done}')
                if read != number:
                    raise Wrong(f'block {block} adds tile {read} of its own where it has tile {number}')
                rest = flying[:i] + flying[i + 1:]
                yield self.replaced(state, block, (at, n, mine, before, filled, emptied, slots, rest), added=(tile, block))

    def released(self, state, block, own, tile):
        add = block + 1 if self.is_first(block, tile) and self.bug != 'the first adds one' else 1
        return self.replaced(state, block, own, turn=(tile, add))

    def thread(self, state, block, own):
        at, n, mine, before, filled, emptied, slots, flying = own
        rest = (filled, emptied, slots)
        if n == self.count(block):  # bulk_wait<0>, and the release of the last sum; the block ends with its last operation
            if before >= 0 and (not flying or self.bug == 'the last is not waited for'):
                yield self.released(state, block, (at, n, mine, -1, *rest, flying), before)
            elif before < 0 and not flying:
                yield self.replaced(state, block, 'end')
            return
        tile = self.tile_of(block, n)
        turn_is_here = self.is_first(block, tile) or state[1][tile] == block
        full = filled > n
        if at == 'poll':
            mine = turn_is_here or self.bug == 'turns are not waited for'
            ahead = before < 0 or (self.slots > 1 and mine and full)
            yield self.replaced(state, block, ('wait' if ahead else 'give', n, mine, before, *rest, flying))
        elif at == 'give':  # bulk_wait<0>, then the release
            if not flying or self.bug == 'released before it is there':
                yield self.released(state, block, ('wait', n, mine, -1, *rest, flying), before)
        elif at == 'wait':  # without the fence the operation need not be behind the turn that the thread has seen
            if mine or turn_is_here or self.bug == 'no fence before':
                yield self.replaced(state, block, ('issue', n, mine or turn_is_here, before, *rest, flying))
        elif at == 'issue':
            if full:
                then = 'read' if mine else 'issued'
                yield self.replaced(state, block, (then, n, mine, before, *rest, flying + ((tile, n, -1),)))
        elif at == 'issued':
            if turn_is_here:
                yield self.replaced(state, block, ('read', n, mine, before, *rest, flying))
        elif at == 'read':  # bulk_wait_read<0>, then the slot is the consumers'
            if all(read >= 0 for _, _, read in flying) or self.bug == 'reads are not waited for':
                yield self.replaced(state, block, ('pass', n, mine, before, filled, emptied + 1, slots, flying))
        elif at == 'pass':  # bulk_wait<1>: all but the newest
            own = ('poll', n + 1, False, tile, *rest, flying)
            if before < 0:
                yield self.replaced(state, block, own)
            elif all(number == n for _, number, _ in flying) or self.bug == 'the one before is not waited for':
                yield self.released(state, block, own, before)

    def explore(self):
        """The number of states. Wrong: a sum out of order, or a state without a way on."""
        first = self.begin()
        seen, left = {first}, [first]
        while left:
            state = left.pop()
            ways = 0
            for way in self.next_states(state):
                ways += 1
                if way not in seen:
                    seen.add(way)
                    left.append(way)
            if ways == 0 and (any(b != 'end' for b in state[0]) or
                              any(list(s) != order for s, order in zip(state[2], self.order))):
                raise Wrong(f'no way on from {state}')
        return len(seen)


# Every block has every tile; causal: later keys are seen by later queries alone; a window, which ends too.
FULL, CAUSAL, WINDOW = [(0, 2)] * 3, [(0, 3), (1, 3), (2, 3)], [(0, 2), (1, 3), (2, 4)]
BUGS = ('tickets fall', 'the first adds one', 'slots are not waited for', 'no fence before', 'turns are not waited for',
        'released before it is there', 'reads are not waited for', 'the one before is not waited for',
        'the last is not waited for')


def main():
    checks = failed = 0
    for name, covers in (('full', FULL), ('causal', CAUSAL), ('window', WINDOW)):
        for slots in (1, 2):
            for resident in (1, 2, 3):
                checks += 1
                try:
                    states = Model(covers, resident, slots).explore()
                    print(f'{name}, {slots} slots, {resident} resident blocks: {states} states')
                except Wrong as wrong:
                    failed += 1
                    print(f'{name}, {slots} slots, {resident} resident blocks: {wrong}', file=sys.stderr)
    for bug in BUGS:
        checks += 1
        found = None
        for covers in (FULL, CAUSAL, WINDOW):
            for resident in (1, 2):
                try:
                    Model(covers, resident, 2, bug).explore()
                except Wrong as wrong:
                    found = found or str(wrong)[:60]
        print(f'planted: {bug}: {found}')
        if found is None:
            failed += 1
            print(f'the planted bug is not found: {bug}', file=sys.stderr)
    print(f'turns: {checks} checks, {failed} failed')
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
