"""Reading traces: both formats, and lines that make no sense."""

import json

import pytest
from bench.workload.chat import to_turn
from bench.workload.scenarios import SCENARIOS, mixed, scenario

from everwarm.errors import BadRequest
from everwarm.simulate.trace import parse, to_line


def mooncake(**more) -> str:
    line = {"timestamp": 1500, "input_length": 1000, "output_length": 3, "hash_ids": [7, 8]} | more
    return json.dumps(line)


def test_mooncakes_blocks_become_tokens_that_agree_where_the_hashes_do():
    one, two = parse([mooncake(), mooncake(timestamp=2000, input_length=1300, hash_ids=[7, 9, 4])])
    assert (one.at_s, len(one.prompt), len(one.reply)) == (1.5, 1000, 3)
    assert one.prompt.common_prefix(two.prompt) == 512
    assert set(one.reply.tolist()).isdisjoint(two.reply.tolist())


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "truncated"),
        ('{"hash_ids": 3}', "array"),
        (mooncake(hash_ids=[7]), "2 blocks of 512"),
        (mooncake(input_length=0, hash_ids=[]), "input_length is 0"),
        (mooncake(input_length=10**9), "input_length is 1000000000"),
        (mooncake(output_length=-1), "output_length is -1"),
        (mooncake(hash_ids=[7, -8]), "token -8 is out of range"),
        (mooncake(hash_ids=[7, 2**40]), "out of range"),
        (mooncake(timestamp=-1), "timestamp is -1"),
        ('{"tokens": [1], "blocks": [[1, 2]]}', "either tokens or blocks"),
        ('{"tokens": []}', "0 items"),
        ('{"tokens": [1], "stable": 2}', "a hint is at 2"),
        ('{"tokens": [1], "colour": 2}', "colour"),
        ('{"blocks": [[1, 0]]}', "blocks need"),
        ('{"tokens": [1], "media": [[0, "zz", 1, 1]]}', "not a digest"),
        ('{"tokens": [1], "at_s": -4}', "at_s is -4"),
        (b'{"tokens": "\xff"}', "line 2"),
    ],
)
def test_a_bad_line_is_named_by_its_number(line, why):
    good = mooncake(timestamp=0)
    first = good.encode() if isinstance(line, bytes) else good
    with pytest.raises(BadRequest, match="line 2 of the trace") as error:
        list(parse([first, line]))
    assert why in str(error.value)


def test_time_never_goes_back():
    with pytest.raises(BadRequest, match="line 3 of the trace: time goes back"):
        list(parse([mooncake(), "", mooncake(timestamp=1)]))


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_written_turn_is_read_back_as_it_was(name):
    turns = [to_turn(step) for step in scenario(name, seed=4, size=0.05)]
    for old, new in zip(turns, parse(map(to_line, turns)), strict=True):
        assert old.prompt.common_prefix(new.prompt) == len(old.prompt) == len(new.prompt)
        assert old.path.codes.tolist() == new.path.codes.tolist()
        assert (old.boundaries, old.stable, old.users) == (new.boundaries, new.stable, new.users)
        assert (old.at_s, old.stop_at, old.before) == (new.at_s, new.stop_at, new.before)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others():
    def written(seed: int) -> bytes:
        return b"".join(to_line(to_turn(step)) for step in mixed(seed, n_sessions=14, size=0.02))

    assert written(1) == written(1) != written(2)


def test_blocks_stand_for_runs_of_tokens():
    (turn,) = parse(['{"blocks": [[5, 3], [6, 2]]}'])
    assert turn.prompt.codes.tolist() == [5, 5, 5, 6, 6]
