"""Flags of ``serve`` that are defaults of requests: sampling, limits, templates."""

from __future__ import annotations

import codecs
import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from everwarm.cli.flags.option_groups import DEFAULTS
from everwarm.config import DRY_BREAKERS, MAX_CONSTRAINT_CHARS, Sampling, parse_samplers, require
from everwarm.errors import BadRequest
from everwarm.gateway.openai.defaults import ReasoningFormat, RequestDefaults

_STANDARD = Sampling()


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class RequestOptions:
    temp: Annotated[float, Parameter(name=["--temp", "--temperature"], group=DEFAULTS, help="temperature")] = (
        _STANDARD.temperature
    )
    top_k: Annotated[int, Parameter(group=DEFAULTS, help="0: off")] = _STANDARD.top_k
    top_p: Annotated[float, Parameter(group=DEFAULTS, help="1: off")] = _STANDARD.top_p
    min_p: Annotated[float, Parameter(group=DEFAULTS, help="0: off")] = _STANDARD.min_p
    top_n_sigma: Annotated[float, Parameter(group=DEFAULTS, help="0 or less: off")] = _STANDARD.top_n_sigma
    typical_p: Annotated[float, Parameter(group=DEFAULTS, help="1: off")] = _STANDARD.typical_p
    xtc_probability: Annotated[float, Parameter(group=DEFAULTS, help="0: off")] = _STANDARD.xtc_probability
    xtc_threshold: Annotated[float, Parameter(group=DEFAULTS, help="more than 0.5: off")] = _STANDARD.xtc_threshold
    dynatemp_range: Annotated[float, Parameter(group=DEFAULTS, help="0: off")] = _STANDARD.dynatemp_range
    dynatemp_exp: Annotated[float, Parameter(group=DEFAULTS, help="of the dynamic temperature")] = (
        _STANDARD.dynatemp_exponent
    )
    repeat_last_n: Annotated[int, Parameter(group=DEFAULTS, help="how far back penalties look")] = (
        _STANDARD.penalty_last_n
    )
    repeat_penalty: Annotated[float, Parameter(group=DEFAULTS, help="1: off")] = _STANDARD.repeat_penalty
    presence_penalty: Annotated[float, Parameter(group=DEFAULTS, help="0: off")] = _STANDARD.presence_penalty
    frequency_penalty: Annotated[float, Parameter(group=DEFAULTS, help="0: off")] = _STANDARD.frequency_penalty
    dry_multiplier: Annotated[float, Parameter(group=DEFAULTS, help="0: off")] = _STANDARD.dry_multiplier
    dry_base: Annotated[float, Parameter(group=DEFAULTS, help="how fast DRY's penalty grows")] = _STANDARD.dry_base
    dry_allowed_length: Annotated[int, Parameter(group=DEFAULTS, help="repetitions that DRY allows, in tokens")] = (
        _STANDARD.dry_allowed_length
    )
    dry_penalty_last_n: Annotated[int, Parameter(group=DEFAULTS, help="how far back DRY looks")] = (
        _STANDARD.dry_penalty_last_n
    )
    dry_sequence_breaker: Annotated[
        tuple[str, ...],
        Parameter(group=DEFAULTS, negative=(), help="text that ends a repetition; repeatable; none: there is none"),
    ] = DRY_BREAKERS
    mirostat: Annotated[int, Parameter(group=DEFAULTS, help="1 or 2: that version; 0: off")] = _STANDARD.mirostat
    mirostat_lr: Annotated[float, Parameter(group=DEFAULTS, help="mirostat's learning rate")] = _STANDARD.mirostat_eta
    mirostat_ent: Annotated[float, Parameter(group=DEFAULTS, help="mirostat's entropy")] = _STANDARD.mirostat_tau
    adaptive_target: Annotated[
        float, Parameter(group=DEFAULTS, help="probability that adaptive-p aims at; negative: off")
    ] = _STANDARD.adaptive_target
    adaptive_decay: Annotated[float, Parameter(group=DEFAULTS, help="how slowly adaptive-p adapts")] = (
        _STANDARD.adaptive_decay
    )
    samplers: Annotated[str, Parameter(group=DEFAULTS, help="their order, with ';' between them")] = ";".join(
        _STANDARD.samplers
    )
    seed: Annotated[int, Parameter(name=["--seed", "-s"], group=DEFAULTS, help="-1: another one every time")] = -1
    logit_bias: Annotated[
        tuple[str, ...],
        Parameter(
            name=["--logit-bias", "-l"], group=DEFAULTS, negative=(), help="TOKEN+BIAS or TOKEN-BIAS; repeatable"
        ),
    ] = ()
    n_predict: Annotated[
        int, Parameter(name=["--n-predict", "-n"], group=DEFAULTS, help="tokens of a reply at most; -1: any number")
    ] = -1
    context_shift: Annotated[
        bool,
        Parameter(
            group=DEFAULTS,
            help="a reply that fills its context drops half of it and goes on; what is left is read again",
        ),
    ] = False
    keep: Annotated[
        int,
        Parameter(group=DEFAULTS, help="tokens that such a reply keeps from its beginning; -1: its whole prompt"),
    ] = 0
    ignore_eos: Annotated[bool, Parameter(group=DEFAULTS, negative=(), help="let no token end a reply")] = False
    reverse_prompt: Annotated[
        tuple[str, ...],
        Parameter(name=["--reverse-prompt", "-r"], group=DEFAULTS, negative=(), help="stop string; repeatable"),
    ] = ()
    escape: Annotated[bool, Parameter(group=DEFAULTS, help=r"read \n, \t … in stop strings and sequence breakers")] = (
        True
    )
    cache_prompt: Annotated[bool, Parameter(group=DEFAULTS, help="reuse what is known of a prompt")] = True
    grammar: Annotated[str | None, Parameter(group=DEFAULTS, help="GBNF that replies must match")] = None
    grammar_file: Annotated[str | None, Parameter(group=DEFAULTS, help="the same from a file")] = None
    json_schema: Annotated[
        str | None, Parameter(name=["--json-schema", "-j"], group=DEFAULTS, help="JSON schema that replies must match")
    ] = None
    json_schema_file: Annotated[
        str | None, Parameter(name=["--json-schema-file", "-jf"], group=DEFAULTS, help="the same from a file")
    ] = None
    reasoning_format: Annotated[
        ReasoningFormat | None, Parameter(group=DEFAULTS, help="none: thinking stays in the text of a reply")
    ] = None
    reasoning: Annotated[
        Literal["on", "off", "auto"],
        Parameter(
            name=["--reasoning", "-rea"], group=DEFAULTS, help="whether models think; auto: as the template says"
        ),
    ] = "auto"
    reasoning_effort: Annotated[
        str, Parameter(group=DEFAULTS, help="level for the template, like low or high; default: the template's")
    ] = "default"
    reasoning_budget: Annotated[
        int, Parameter(group=DEFAULTS, help="tokens of thinking, after which it is ended; -1: any number")
    ] = -1
    reasoning_budget_message: Annotated[
        str | None, Parameter(group=DEFAULTS, help="text that is written before the end of a thought that was ended")
    ] = None
    spm_infill: Annotated[
        bool,
        Parameter(group=DEFAULTS, negative=(), help="/infill puts what follows the cursor before what precedes it"),
    ] = False
    chat_template_kwargs: Annotated[
        str | None, Parameter(group=DEFAULTS, help="JSON object with values for the chat template")
    ] = None

    def defaults(self) -> RequestDefaults:
        budget = self.reasoning_budget
        require(-1 <= budget <= 1 << 26, f"reasoning-budget is {budget}; give -1 (any number) or more")
        require(-2 <= self.n_predict <= 1 << 26, f"n-predict is {self.n_predict}; give -1 (any number) or more")
        require(-1 <= self.keep <= 1 << 26, f"keep is {self.keep}; give -1 (the whole prompt) or more")
        return RequestDefaults(
            sampling=self._sampling(),
            max_tokens=None if self.n_predict < 0 else self.n_predict,
            stop=self._texts(self.reverse_prompt),
            context_shift=self.context_shift,
            n_keep=self.keep,
            ignore_eos=self.ignore_eos,
            cache_prompt=self.cache_prompt,
            grammar=_given(self.grammar, self.grammar_file, "grammar"),
            json_schema=_object("json-schema", _given(self.json_schema, self.json_schema_file, "json-schema")),
            reasoning_format=self.reasoning_format,
            reasoning_budget=None if self.reasoning_budget < 0 else self.reasoning_budget,
            reasoning_budget_message=self.reasoning_budget_message,
            spm_infill=self.spm_infill,
            template_kwargs=self._template_kwargs(),
        )

    def _sampling(self) -> Sampling:
        breakers = () if self.dry_sequence_breaker == ("none",) else self._texts(self.dry_sequence_breaker)
        return Sampling(
            temperature=max(0.0, self.temp),
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            penalty_last_n=max(0, self.repeat_last_n),
            seed=None if self.seed < 0 else self.seed % ((1 << 32) - 1),
            logit_bias=dict(map(_bias, self.logit_bias)),
            typical_p=self.typical_p,
            top_n_sigma=self.top_n_sigma,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            dynatemp_range=self.dynatemp_range,
            dynatemp_exponent=self.dynatemp_exp,
            dry_multiplier=self.dry_multiplier,
            dry_base=self.dry_base,
            dry_allowed_length=self.dry_allowed_length,
            dry_penalty_last_n=max(0, self.dry_penalty_last_n),
            dry_sequence_breakers=breakers,
            mirostat=self.mirostat,
            mirostat_tau=self.mirostat_ent,
            mirostat_eta=self.mirostat_lr,
            adaptive_target=self.adaptive_target,
            adaptive_decay=self.adaptive_decay,
            samplers=parse_samplers([name for name in self.samplers.split(";") if name]),
        )

    def _texts(self, given: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(_unescaped, given)) if self.escape else given

    def _template_kwargs(self) -> dict[str, Any]:
        given = _object("chat-template-kwargs", self.chat_template_kwargs) or {}
        if self.reasoning != "auto":
            given = {"enable_thinking": self.reasoning == "on", **given}
        if self.reasoning_effort != "default":
            given = {"reasoning_effort": self.reasoning_effort, **given}
        return given


def _unescaped(text: str) -> str:
    return re.sub(r"\\(?:[nrt'\"\\]|x[0-9a-fA-F]{2})", lambda found: codecs.decode(found[0], "unicode_escape"), text)


def _bias(text: str) -> tuple[int, float]:
    found = re.fullmatch(r"(\d{1,9})([+-](?:\d+(?:\.\d*)?|\.\d+|inf))", text)
    require(found is not None, f"logit-bias is {text!r}; give a token and a number, like 15043-1")
    assert found is not None
    return int(found[1]), float(found[2])


def _given(text: str | None, file: str | None, name: str) -> str | None:
    require(text is None or file is None, f"give --{name} or --{name}-file, not both")
    return text if file is None else read_text(file, MAX_CONSTRAINT_CHARS)


def _object(name: str, text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"--{name} is not JSON: {error}") from None
    require(isinstance(found, dict), f"--{name} is {text[:40]!r}; give a JSON object")
    return dict(found)


def read_text(path: str, most: int) -> str:
    """A file that a flag names."""
    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(most + 1)
        require(len(data) <= most, f"{path} has more than {most} bytes")
        return data.decode()
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadRequest(f"{path} is not UTF-8") from None
