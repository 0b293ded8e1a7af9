"""Forms in the engine: what is picked obeys, whatever becomes of the request, and everything else stays as it was."""

import json
import re

import numpy as np
import pytest

from everwarm.config import GREEDY, Constraint, Sampling, Thought
from everwarm.engine.engine import Engine
from everwarm.engine.request import Finish, NewToken
from everwarm.engine.settings import EngineSettings
from everwarm.errors import BadRequest
from everwarm.llama.constraints.matcher import ConstraintCompiler
from everwarm.llama.model import Model
from support.drive import drain, open_core, run, submit, text
from support.models import EMBEDDED, tiny_model

SETTINGS = EngineSettings(n_slots=2, n_ctx=2048, n_threads=1)
DIGITS = Constraint("regex", "[0-9]{12}")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"enum": [1, 2]}},
    "required": ["a", "b"],
}
PAIR = Constraint(
    "json_schema", json.dumps(SCHEMA | {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}})
)


@pytest.fixture(scope="module")
def engine():
    with Engine(EMBEDDED, SETTINGS) as opened:
        yield opened


@pytest.fixture(scope="module")
def tiny():
    """A vocabulary of bytes: no tag of a tool call is one of its tokens, but the tags of thinking are."""
    with Model(tiny_model("qwen35", width=128)) as model, ConstraintCompiler(model.vocab) as forms:
        yield forms


def generated(engine, form, prompt="Hello", seed=1, temperature=1.0, **more):
    sampling = Sampling(temperature=temperature, seed=seed)
    result = engine.submit(prompt, sampling, constraint=form, **({"max_tokens": 80} | more)).result()
    return result, engine.model.vocab.detokenize(result.tokens).decode()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_written_has_the_form_and_ends_with_it(engine, temperature):
    for seed in range(8):
        result, words = generated(engine, PAIR, seed=seed, temperature=temperature)
        answer = json.loads(words)
        assert result.finish is Finish.STOP and set(answer) == {"a", "b"} and answer["b"] in (1, 2)
    result, words = generated(engine, None, temperature=temperature)
    with pytest.raises(ValueError):
        json.loads(words)


def test_penalties_and_bias_cannot_break_the_form(engine):
    banned = {
        int(t): -float("inf") for t in engine.model.vocab.tokenize("0123", add_special=False, parse_special=False)
    }
    sampling = Sampling(seed=3, repeat_penalty=5.0, logit_bias=banned)
    result = engine.submit("Hello", sampling, constraint=DIGITS, max_tokens=80).result()
    digits = engine.model.vocab.detokenize(result.tokens).decode()
    assert re.fullmatch("[4-9]{12}", digits)


def test_the_same_seed_says_the_same_and_another_does_not(engine):
    form = Constraint("regex", "[a-z ]{40}")
    first, again, other = (generated(engine, form, seed=seed, deterministic=True)[1] for seed in (5, 5, 6))
    assert first == again != other


def test_a_reply_that_is_cut_or_wants_no_end(engine):
    assert generated(engine, DIGITS, max_tokens=5)[0].finish is Finish.LENGTH
    assert generated(engine, DIGITS, max_tokens=0)[0].finish is Finish.LENGTH
    open_end = Constraint("regex", "(ab)+")
    assert generated(engine, open_end, ignore_eos=True, max_tokens=20)[0].finish is Finish.LENGTH
    exact, words = generated(engine, Constraint("regex", "xy|xyz"), ignore_eos=True, max_tokens=20)
    assert exact.finish is Finish.STOP and words == "xyz"


def test_a_model_ends_only_where_the_form_may_end(engine):
    eog = dict.fromkeys(engine.model.vocab.eog, 80.0)
    free = engine.submit("Hello", Sampling(temperature=0.0, logit_bias=eog)).result()
    assert free.tokens == ()
    forced = engine.submit(
        "Hello", Sampling(temperature=0.0, logit_bias=eog), constraint=Constraint("regex", "a{3,9}")
    ).result()
    assert engine.model.vocab.detokenize(forced.tokens) == b"aaa" and forced.finish is Finish.STOP


def test_the_identical_prompt_decodes_nothing_and_still_obeys():
    prompt = text(1, 80)
    with open_core(n_spares=4) as core, ConstraintCompiler(core.model.vocab) as forms:
        free = run(core, prompt, n_probs=2)
        form = forms.compile(DIGITS)
        first, again = (run(core, prompt, 40, constraint=form) for _ in range(2))
        assert first.n_cached == again.n_cached == len(prompt) and free.n_cached == 0
        assert first.tokens == again.tokens != free.tokens
        assert re.fullmatch(rb"[0-9]{12}", core.model.vocab.detokenize(first.tokens))


def test_probabilities_are_the_models_own():
    with open_core(n_spares=4) as core, ConstraintCompiler(core.model.vocab) as forms:
        tops = []
        for form in (None, forms.compile(DIGITS)):
            request = submit(core, text(1, 80), 1, n_probs=3, constraint=form)
            events = []
            while core.has_work:
                events += core.step()
            (picked,) = [e for e in events if isinstance(e, NewToken) and e.request_id == request.id]
            tops.append([token for token, _ in picked.probs.top])
        assert tops[0] == tops[1] and chr(picked.token).isdigit() and picked.probs.logprob < 0


def test_suspended_requests_go_on_in_their_form():
    with open_core(n_ctx=256) as core, ConstraintCompiler(core.model.vocab) as forms:
        form = forms.compile(Constraint("regex", "(ab|cd){60}"))
        asked = [submit(core, text(seed, 60), 130, constraint=form, sampling=Sampling(seed=seed)) for seed in (1, 2)]
        results = drain(core)
        assert core.counts.n_suspended >= 1
        for request in asked:
            words = core.model.vocab.detokenize(results[request.id].tokens)
            assert re.fullmatch(rb"(ab|cd){60}", words) and results[request.id].finish is Finish.STOP


def test_a_form_that_fails_on_the_way_fails_its_request_alone():
    with open_core() as core, ConstraintCompiler(core.model.vocab) as forms:
        compiled = forms.compile(DIGITS)
        bad, good = (submit(core, text(seed, 50), 40, constraint=compiled) for seed in (1, 2))
        accept = bad.sampler.matcher.accept
        bad.sampler.matcher.accept = lambda token: accept(token if bad.n_reply < 4 else 0)
        results = drain(core)
        assert isinstance(results[bad.id].error, BadRequest) and results[bad.id].finish is Finish.ERROR
        assert results[good.id].finish is Finish.STOP and len(results[good.id].tokens) == 12
        assert run(core, text(3, 50)).error is None


# tags: one token here, text there


def everything(matcher, vocab, rng, most=60):
    tokens = []
    while len(tokens) < most and not matcher.is_complete and matcher.look():
        ids = matcher.allowed()
        tokens.append(int(rng.choice(ids)))
        matcher.accept(tokens[-1])
    return tokens


def test_a_tag_is_written_as_the_vocabulary_has_it(engine, tiny):
    form = Constraint("lark", "start: tag_0 tag_1 tag_2", tags=("<tool_call>", "<|im_start|>", "plain"))
    rng = np.random.default_rng(0)
    for forms in (engine.constraints, tiny):
        vocab = forms._vocab
        tokens = everything(forms.compile(form).matcher(), vocab, rng)
        assert vocab.detokenize(tokens) == b"<tool_call><|im_start|>plain"
        control = vocab.tokenize("<|im_start|>", add_special=False, parse_special=True)
        assert len(control) == 1 and int(control[0]) in tokens
    assert len(tokens) == len("<tool_call>") + 1 + len("plain"), "bytes, where no token is the tag"


def test_a_lark_grammar_may_name_tokens_and_text_never_matches_control_tokens(engine):
    named = Constraint("lark", 'start: <tool_call> "<|im_start|>" // <nothing>')
    tokens = everything(engine.constraints.compile(named).matcher(), engine.model.vocab, np.random.default_rng(0))
    assert engine.model.vocab.detokenize(tokens) == b"<tool_call><|im_start|>"
    control, call = (
        engine.model.vocab.tokenize(t, add_special=False, parse_special=True)[0]
        for t in ("<|im_start|>", "<tool_call>")
    )
    assert tokens[0] == call and control not in tokens


@pytest.mark.parametrize(
    "tags", [("<think>", "</think>"), ("<|vision_start|>", "<|vision_end|>"), ("[THINK]", "[/THINK]")]
)
def test_thinking_is_free_up_to_its_end(engine, tags):
    """Tags that are defined tokens, control tokens, and plain text."""
    opening, closing = tags
    vocab = engine.model.vocab

    def tokenize(words):
        return vocab.tokenize(words, add_special=False, parse_special=True).tolist()

    for thought, before in ((Thought(closing), ""), (Thought(closing, opening), opening)):
        form = engine.constraints.compile(Constraint("regex", "[0-9]{2}", thought=thought))
        matcher = form.matcher()
        for token in (*tokenize(before + "Hm, 12 and {"), *tokenize("x" + closing), *tokenize("\n\n")):
            assert matcher.look() and matcher.allows(token), vocab.piece(token)
            matcher.accept(token)
        rest = everything(matcher, vocab, np.random.default_rng(1))
        assert re.fullmatch(rb"[ \t\r\n]*[0-9]{2}", vocab.detokenize(rest)) and matcher.is_complete
    without = engine.constraints.compile(Constraint("regex", "[0-9]{2}", thought=Thought(closing, opening))).matcher()
    for token in tokenize("42"):
        assert without.look() and without.allows(token)
        without.accept(token)
    assert without.is_complete


# what cannot be used


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (Constraint("json_schema", "{"), "cannot be used"),
        (Constraint("json_schema", '{"type": "nope"}'), "Invalid type: nope"),
        (Constraint("regex", "(a"), "cannot be used"),
        (Constraint("lark", "start: nope"), "nope"),
        (Constraint("gbnf", "root ::= nope"), "nope"),
        (
            Constraint(
                "json_schema",
                json.dumps({"allOf": [{"type": "string", "pattern": f".*{'ab'[i % 2] * i}.*"} for i in range(99)]}),
            ),
            "too complex",
        ),
        (
            Constraint("lark", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(20000)) + '\nr20000: "a"'),
            "too complex",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_and_the_next_form_works(engine, form, words):
    with pytest.raises(BadRequest, match=words):
        engine.submit("Hello", GREEDY, constraint=form)
    assert generated(engine, DIGITS)[0].finish is Finish.STOP


def test_a_form_has_a_size():
    with pytest.raises(BadRequest, match="at most 1048576"):
        Constraint("regex", "a" * ((1 << 20) + 1))


def test_a_namespace_compiles_what_another_has_used_and_keeps_its_own(tiny):
    own = tiny.compile(DIGITS, "a")
    assert tiny.compile(DIGITS, "b") is not own, "time would tell that somebody uses this form"
    for i in range(20):
        tiny.compile(Constraint("regex", f"[0-9]{{{i + 2}}}"), "b")
    assert tiny.compile(DIGITS, "a") is own, "the control: its own is known, whatever others use"
