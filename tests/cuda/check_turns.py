#!/usr/bin/env python3
"""check_turns.py -- the turns of attention's backward on GPUs, in every interleaving of its steps

Blocks of keys add to dQ of a tile of queries in the order of their numbers, whatever runs when. There are two models:

- 9.0, upi_cuda_bwd90_sum in upipe/cuda/upipe_cuda_attn_bwd90.h: sums of bulk operations. Two slots, and the next turn is
  asked for while a sum is on its way; above head dim 128 one slot, and two rounds a tile. The slot of a tile's last round
  goes back with the tile's turn, when its sum is in memory.
- 8.0, upi_cuda_attn_bwd_kernel in upipe_cuda_attn_bwd.h: one thread asks, all add, another one gives on. The last block
  of a tile reads the sum.

They have the steps, the consumers that fill the slots, and what the memory model leaves open: a bulk operation reads its
slot and reaches memory whenever it likes between the fence before it and the wait for it, two of them in either order;
what a thread adds arrives at any time before a release behind it. All reachable states are searched. In each, sums come
in order, each from its own part; the last block reads all of them; no state is without a way on, with as few blocks
resident as may be. Then each planted bug must be found.

The models are written by hand after the code; they say nothing about what the compiler makes of it.
"""

import sys


class Wrong(Exception):
    pass


class Turns:
    """What both kernels have in common. covers: the tiles [first, end) of each block; neither falls. resident: blocks that
    run at a time. cells: parts of a tile whose sums are ordered each for itself."""

    def __init__(self, covers, resident, cells, bug):
        self.covers, self.resident, self.cells, self.bug = covers, resident, cells, bug
        self.tiles = max(end for _, end in covers)
        self.order = [[b for b, (first, end) in enumerate(covers) if first <= m < end] for m in range(self.tiles)]

    def is_first(self, block, tile):
        return block == 0 or tile >= self.covers[block - 1][1]

    def tile_of(self, block, n):
        return self.covers[block][1] - 1 - n  # queries down

    def count(self, block):
        return self.covers[block][1] - self.covers[block][0]

    # A state is (blocks, turns, sums): a block is None before it has begun, 'end' after it, else a tuple; sums are those
    # of every cell of every tile, as the numbers of the blocks that have added.

    def begin(self):
        return ((None,) * len(self.covers), (0,) * self.tiles, ((),) * (self.tiles * self.cells))

    def tickets(self):
        blocks = range(len(self.covers))
        return reversed(blocks) if self.bug == 'tickets fall' else blocks

    def next_states(self, state):
        blocks = state[0]
        running = sum(isinstance(b, tuple) for b in blocks)
        for block in self.tickets():
            if blocks[block] is None:
                if running < self.resident:
                    yield self.replaced(state, block, self.NEW)
                break
        for block, own in enumerate(blocks):
            if isinstance(own, tuple):
                yield from self.steps(state, block, own)

    @staticmethod
    def replaced(state, block, own, turn=None, added=None):
        blocks, turns, sums = state
        blocks = blocks[:block] + (own,) + blocks[block + 1:]
        if turn is not None:
            tile, more = turn
            turns = turns[:tile] + (turns[tile] + more,) + turns[tile + 1:]
        if added is not None:
            cell, entry = added
            sums = sums[:cell] + (sums[cell] + (entry,),) + sums[cell + 1:]
        return blocks, turns, sums

    def released(self, state, block, own, tile):
        add = block + 1 if self.is_first(block, tile) and self.bug != 'the first adds one' else 1
        return self.replaced(state, block, own, turn=(tile, add))

    def lands(self, state, block, cell):
        """The block's part reaches memory, or it reads what the others have put there: all of those before, no others."""
        done, order = len(state[2][cell]), self.order[cell // self.cells]
        if order[done:done + 1] != [block]:
            raise Wrong(f'block {block} adds to cell {cell} in place {done}')

    def whole(self, state):
        return (all(b == 'end' for b in state[0]) and
                all(list(sums) == self.order[cell // self.cells] for cell, sums in enumerate(state[2])))

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
            if ways == 0 and not self.whole(state):
                raise Wrong(f'no way on from {state}')
        return len(seen)


class Hopper(Turns):
    """upi_cuda_bwd90_sum. A tile goes out in rounds, each a cell, numbered on over tiles. A block:
    at       the next step of the thread that sums
    r        the number of its round;  mine: it has the turn;  before: the tile whose sum is on its way, or -1
    filled   rounds that the consumers have written;  emptied: those whose slot they may write again
    slots    the number of the round in each slot
    flying   operations (number, what was read, or -1), not in memory yet
    """

    NEW = ('poll', 0, False, -1, 0, 0, (-1, -1), ())

    def __init__(self, covers, resident, slots, rounds, bug=''):
        super().__init__(covers, resident, rounds, bug)
        self.slots = slots

    def steps(self, state, block, own):
        yield from self.consumers(state, block, own)
        yield from self.flight(state, block, own)
        yield from self.thread(state, block, own)

    def consumers(self, state, block, own):
        at, r, mine, before, filled, emptied, slots, flying = own
        free = filled - emptied < self.slots or self.bug == 'slots are not waited for'
        if filled < self.count(block) * self.cells and free:
            slot = filled % self.slots
            slots = slots[:slot] + (filled,) + slots[slot + 1:]
            yield self.replaced(state, block, (at, r, mine, before, filled + 1, emptied, slots, flying))

    def flight(self, state, block, own):
        for i, (number, read) in enumerate(own[-1]):
            if read < 0:
                rest = own[-1][:i] + ((number, own[-2][number % self.slots]),) + own[-1][i + 1:]
                yield self.replaced(state, block, (*own[:-1], rest))
            else:
                cell = self.tile_of(block, number // self.cells) * self.cells + number % self.cells
                self.lands(state, block, cell)
                if read != number:
                    raise Wrong(f'block {block} adds part {read} of its own where it has part {number}')
                yield self.replaced(state, block, (*own[:-1], own[-1][:i] + own[-1][i + 1:]), added=(cell, block))

    def thread(self, state, block, own):
        at, r, mine, before, filled, emptied, slots, flying = own
        rest = (filled, emptied, slots)
        given = (filled, emptied + 1, slots)  # the slot of the tile whose sum is there
        if r == self.count(block) * self.cells:  # bulk_wait<0>, the last release; the block ends with its last operation
            if before >= 0 and (not flying or self.bug == 'the last is not waited for'):
                yield self.released(state, block, (at, r, mine, -1, *given, flying), before)
            elif before < 0 and not flying:
                yield self.replaced(state, block, 'end')
            return
        tile, last = self.tile_of(block, r // self.cells), r % self.cells == self.cells - 1
        turn_is_here = self.is_first(block, tile) or state[1][tile] == block
        full = filled > r
        if at == 'poll':
            mine = turn_is_here or self.bug == 'turns are not waited for'
            ahead = before < 0 or (self.slots > 1 and mine and full)
            yield self.replaced(state, block, ('wait' if ahead else 'give', r, mine, before, *rest, flying))
        elif at == 'give':  # bulk_wait<0>, then the release
            late = self.bug == 'released before its last round is there' and all(x == r - 1 for x, _ in flying)
            if not flying or late or self.bug == 'released before it is there':
                yield self.released(state, block, ('wait', r, mine, -1, *given, flying), before)
        elif at == 'wait':  # without the fence the operation need not be behind the turn that the thread has seen
            if mine or turn_is_here or self.bug == 'no fence before':
                yield self.replaced(state, block, ('issue', r, mine or turn_is_here, before, *rest, flying))
        elif at == 'issue':
            if full or (self.bug == 'the second round is not waited for' and r % self.cells > 0):
                then = ('pass' if last else 'read') if mine else 'issued'
                yield self.replaced(state, block, (then, r, mine, before, *rest, flying + ((r, -1),)))
        elif at == 'issued':
            if turn_is_here:
                yield self.replaced(state, block, ('pass' if last else 'read', r, mine, before, *rest, flying))
        elif at == 'read':  # between rounds: bulk_wait_read<0>, then the slot is the consumers'
            if all(read >= 0 for _, read in flying) or self.bug == 'reads are not waited for':
                more = 0 if self.bug == 'a slot is given back once a tile' else 1
                yield self.replaced(state, block, ('issue', r + 1, mine, before, filled, emptied + more, slots, flying))
        elif at == 'pass':  # bulk_wait<1>: all but the newest
            if self.bug == 'a slot is given back before its sum is there':
                rest, given = given, given
            if before < 0:
                yield self.replaced(state, block, ('poll', r + 1, False, tile, *rest, flying))
            elif all(number == r for number, _ in flying) or self.bug == 'the one before is not waited for':
                yield self.released(state, block, ('poll', r + 1, False, tile, *given, flying), before)


class Ampere(Turns):
    """upi_cuda_attn_bwd_kernel, by two threads that each have a cell: thread 1 asks for the turn, thread 0 gives it on. A
    block is (place of thread 0, place of thread 1, cells of parts that have left and are not in memory yet); a place is
    six times the number of the tile and the step. The last block of a tile reads the sum and writes dQ, unless it merges:
    its entry is negative then."""

    BEGIN, ASK, TURN, ADD, END, PASS, STEPS = range(7)  # BEGIN, TURN and END are barriers
    NEW = (0, 0, ())

    def __init__(self, covers, resident, merge, bug=''):
        super().__init__(covers, resident, 2, bug)
        self.merge = merge

    def is_last(self, block, tile):
        first = self.covers[block + 1][0] if block + 1 < len(self.covers) else self.tiles
        return first > tile or (self.bug == 'one before the last takes itself for it' and first == tile)

    def whole(self, state):
        sums = []
        for cell, entries in enumerate(state[2]):
            last = entries[-1] if entries else 0
            if (last < 0) == self.merge:
                return False
            sums.append(entries[:-1] + (~last if last < 0 else last,))
        return super().whole((*state[:2], tuple(sums)))

    def steps(self, state, block, own):
        places, flying = own[:2], own[2]
        for cell in flying:
            self.lands(state, block, cell)
            rest = tuple(x for x in flying if x != cell)
            yield self.replaced(state, block, (*places, rest), added=(cell, block))
        if min(places) == self.count(block) * self.STEPS:
            if not flying:
                yield self.replaced(state, block, 'end')
            return
        if places[0] == places[1] and places[0] % self.STEPS in (self.BEGIN, self.TURN, self.END):
            yield self.replaced(state, block, (places[0] + 1, places[1] + 1, flying))
        for thread in 0, 1:
            if places[thread] < self.count(block) * self.STEPS:
                yield from self.thread(state, block, own, thread)

    def thread(self, state, block, own, thread):
        n, step = divmod(own[thread], self.STEPS)
        tile, flying = self.tile_of(block, n), own[2]
        cell = tile * 2 + thread

        def on(flying):
            places = list(own[:2])
            places[thread] += 1
            return (*places, flying)

        if step == self.ASK:
            turn_is_here = self.is_first(block, tile) or state[1][tile] == block
            if thread == 0 or turn_is_here or self.bug == 'turns are not waited for':
                yield self.replaced(state, block, on(flying))
        elif step == self.ADD:
            if self.is_last(block, tile) and not self.merge and self.bug != 'the last adds as others do':
                self.lands(state, block, cell)  # it reads what is there
                yield self.replaced(state, block, on(flying), added=(cell, ~block))
            else:
                yield self.replaced(state, block, on(flying + (cell,)))
        elif step == self.PASS:
            # what the barrier has put before the release; without a barrier the thread's own
            ahead = [x for x in flying if self.bug != 'given on before all have added' or x % 2 == 0]
            if thread == 1 or self.is_last(block, tile):
                yield self.replaced(state, block, on(flying))
            elif not ahead or self.bug == 'the release does not wait':
                yield self.released(state, block, on(flying), tile)
        elif (step == self.TURN and self.bug == 'one thread alone has seen the turn' or
              step == self.END and self.bug == 'given on before all have added'):
            yield self.replaced(state, block, on(flying))


# Every block has every tile; causal: later keys are seen by later queries alone; a window, which ends too.
FULL, CAUSAL, WINDOW = [(0, 2)] * 3, [(0, 3), (1, 3), (2, 3)], [(0, 2), (1, 3), (2, 4)]
COVERS = {'full': FULL, 'causal': CAUSAL, 'window': WINDOW}
ALL = tuple(COVERS)
# What a model is made with, besides covers and residents; where three blocks at a time are tried, whose states are many;
# the bugs that it must find.
KERNELS = (
    ('9.0, two slots', Hopper, (2, 1), ALL,
     ('tickets fall', 'the first adds one', 'slots are not waited for', 'no fence before', 'turns are not waited for',
      'released before it is there', 'a slot is given back before its sum is there',
      'the one before is not waited for', 'the last is not waited for')),
    ('9.0, two rounds in one slot', Hopper, (1, 2), ('full',),
     ('slots are not waited for', 'reads are not waited for', 'released before its last round is there',
      'the second round is not waited for', 'a slot is given back once a tile')),
    ('8.0', Ampere, (False,), ('full', 'causal'),
     ('tickets fall', 'the first adds one', 'turns are not waited for', 'one thread alone has seen the turn',
      'given on before all have added', 'the release does not wait', 'one before the last takes itself for it',
      'the last adds as others do')),
    ('8.0, merging', Ampere, (True,), ('full',), ('given on before all have added', 'the release does not wait')),
)


def main():
    checks = failed = 0
    for kernel, model, options, three, bugs in KERNELS:
        for name, covers in COVERS.items():
            for resident in (1, 2, 3) if name in three else (1, 2):
                checks += 1
                try:
                    states = model(covers, resident, *options).explore()
                    print(f'{kernel}, {name}, {resident} resident blocks: {states} states')
                except Wrong as wrong:
                    failed += 1
                    print(f'{kernel}, {name}, {resident} resident blocks: {wrong}', file=sys.stderr)
        for bug in bugs:
            checks += 1
            found = None
            for covers in COVERS.values():
                for resident in (1, 2):
                    try:
                        if found is None:
                            model(covers, resident, *options, bug).explore()
                    except Wrong as wrong:
                        found = str(wrong)[:60]
            print(f'planted: {kernel}: {bug}: {found}')
            if found is None:
                failed += 1
                print(f'{kernel}: the planted bug is not found: {bug}', file=sys.stderr)
    print(f'turns: {checks} checks, {failed} failed')
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
