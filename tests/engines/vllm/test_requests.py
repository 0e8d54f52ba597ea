"""What a request may say on vLLM, what comes back, and what is refused before it costs anything."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import uuid

import pytest

from brainpatch.errors import EngineError, RequestError, UnknownPatchError
from brainpatch.runtime import GenerationConfig, wire
from brainpatch.runtime.meaning import ActivePatch, resolve
from brainpatch.runtime.requests import Request
from tests.engines.vllm.material import steering
from tests.factories import make_patch

pytestmark = [pytest.mark.vllm, pytest.mark.model]

GREEDY = GenerationConfig(max_new_tokens=16, ignore_eos=True)


def drawn(**fields):
    return GenerationConfig(max_new_tokens=12, temperature=1.0, ignore_eos=True, **fields)


def ids(backend, prompt, config, **given):
    return [one.token_ids for one in backend.generate_detailed([prompt], config, **given)]


def test_a_generation_is_filled(backend, chats):
    backend.install_patch(steering("p"))
    config = GenerationConfig(max_new_tokens=5, logprobs=3, ignore_eos=True)
    answer = backend.generate_detailed([chats[0]], config, patches={"p": 2})[0]
    assert len(answer.token_ids) == len(answer.logprobs) == 5
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert token in entry
        assert 3 <= len(entry) <= 4
        assert all(value <= 0 for value in entry.values())
    assert answer.finish_reason == "length"
    assert answer.prompt_tokens == len(chats[0])
    assert answer.patches == {"p": 2.0}
    assert len(answer.digest) == 64
    assert backend.generate_detailed([chats[0]], GREEDY)[0].logprobs is None


def test_text_messages_and_ids_are_one_prompt(backend, chats, tokenizer):
    text = "Tell me about the sea."
    messages = [{"role": "user", "content": text}]
    answers = backend.generate_batch([text, messages, chats[0]], GREEDY)
    assert len(set(answers)) == 1
    assert answers[0] == tokenizer.decode(ids(backend, chats[0], GREEDY)[0], skip_special_tokens=True)
    assert backend.generate(text, GREEDY, system="You are a pirate.") != answers[0]
    assert backend.generate(text, GREEDY, use_chat_template=False) != answers[0]


def test_n_answers_are_drawn_with_n_seeds(backend, chats):
    several = ids(backend, chats[0], drawn(n=3, seed=7))
    assert len({tuple(one) for one in several}) == 3
    assert several[1] == ids(backend, chats[0], drawn(seed=8))[0]
    assert ids(backend, chats[0], drawn(n=3, seed=7)) == several
    assert ids(backend, chats[0], drawn(seed=-1)) == ids(backend, chats[0], drawn(seed=-1))
    assert ids(backend, chats[0], drawn(seed=None)) != ids(backend, chats[0], drawn(seed=None))


def test_stop_ends_an_answer_before_the_string(backend, chats):
    whole = backend.generate_detailed([chats[0]], GREEDY)[0].text
    word = whole.split()[4]
    config = GenerationConfig(max_new_tokens=16, stop=[word])
    answer = backend.generate_detailed([chats[0]], config)[0]
    assert answer.text == whole[: whole.index(word)]
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"extra": {"top_k": 1}},
        {"extra": {"allowed_token_ids": [28]}},
    ],
)
def test_a_parameter_reaches_the_engine(backend, chats, fields):
    if fields.get("extra", {}).get("top_k"):
        with pytest.raises(RequestError, match="BP404"):
            ids(backend, chats[0], drawn(**fields))
    elif "extra" in fields:
        assert ids(backend, chats[0], drawn(**fields)) == [[28] * 12]
    else:
        greedy = GenerationConfig(max_new_tokens=12, ignore_eos=True)
        assert ids(backend, chats[0], drawn(**fields)) == ids(backend, chats[0], greedy)


def test_penalties_reach_the_engine(backend, chats):
    start = ids(backend, chats[0], GenerationConfig(max_new_tokens=60, ignore_eos=True))
    for name, value in (("repetition_penalty", 5.0), ("presence_penalty", 2.0), ("frequency_penalty", 2.0)):
        config = GenerationConfig(max_new_tokens=60, ignore_eos=True, **{name: value})
        assert ids(backend, chats[0], config) != start, name


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"temperature": 3.0}, "BP404"),
        ({"temperature": 0.001}, "BP404"),
        ({"extra": {"colour": 1}}, "BP404"),
        ({"extra": {"n": 2}}, "BP404"),
        ({"extra": {"output_kind": 0}}, "BP404"),
        ({"extra": {"cache_salt": ""}}, "BP404"),
        ({"extra": {"min_tokens": 99}}, "BP404"),
        ({"extra": {"allowed_token_ids": [999999]}}, "BP404"),
        ({"max_new_tokens": 1024}, "BP406"),
        ({"extra": {"min_tokens": 1.5}}, "BP404"),
        ({"extra": {"repetition_detection": 1}}, "BP404"),
        ({"extra": {"skip_special_tokens": "no"}}, "BP404"),
    ],
)
def test_a_parameter_is_refused_by_code(backend, chats, fields, code):
    with pytest.raises(RequestError) as caught:
        backend.generate_detailed([chats[0]], GenerationConfig(**{"max_new_tokens": 8, **fields}))
    assert caught.value.code == code


def test_the_longest_prompt_that_fits_is_answered(backend, chats):
    backend.install_patch(steering("p"))
    longest = (chats[0] * 30)[:1020]
    answer = backend.generate_detailed([longest], GenerationConfig(max_new_tokens=4, ignore_eos=True))[0]
    assert len(answer.token_ids) == 4
    with pytest.raises(RequestError, match="BP406"):
        backend.generate_detailed([longest], GenerationConfig(max_new_tokens=5))


def test_an_unknown_patch_is_refused(backend, chats):
    with pytest.raises(UnknownPatchError, match="BP401"):
        ids(backend, chats[0], GREEDY, patches={"q": 1})


def test_a_stream_is_the_answer_in_pieces_and_ends_when_closed(backend, chats):
    backend.install_patch(steering("p"))
    whole = backend.generate(chats[0], GREEDY)
    pieces = list(backend.stream(chats[0], GREEDY))
    assert "".join(pieces) == whole
    assert len(pieces) > 4
    long = GenerationConfig(max_new_tokens=900, ignore_eos=True)
    stream = backend.stream(chats[0], long)
    next(stream)
    stream.close()
    assert backend.generate(chats[0], GREEDY) == whole
    assert not backend._driver._sinks


def test_a_stream_on_an_event_loop(backend, chats):
    backend.install_patch(steering("p"))

    async def both():
        async def text(wish):
            return "".join([piece async for piece in backend.astream(chats[0], GREEDY, patches=wish)])

        return await asyncio.gather(text({"p": 1}), text({}))

    assert asyncio.run(both()) == [
        backend.generate(chats[0], GREEDY, patches={"p": 1}),
        backend.generate(chats[0], GREEDY, patches={}),
    ]


def test_threads_share_the_engine(backend, chats):
    backend.install_patch(steering("p"))
    wanted = {x: ids(backend, chats[0], GREEDY, patches={"p": x}) for x in (0, 1, -1)}
    answers = {}

    def ask(x):
        answers[x] = ids(backend, chats[0], GREEDY, patches={"p": x})

    threads = [threading.Thread(target=ask, args=(x,)) for x in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == wanted


@pytest.mark.parametrize(
    ("requests", "least_changes"),
    [(60, 50), pytest.param(300, 500, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
)
def test_patches_change_under_load_and_requests_keep_what_they_were_admitted_with(
    backend, chats, requests, least_changes
):
    """One thread changes, others ask; each answer is that of the digest it came with."""
    config = GenerationConfig(max_new_tokens=6, ignore_eos=True)
    variants = [steering("p", (layer,)) for layer in (12, 15)]
    backend.install_patch(variants[0])
    stop = threading.Event()
    changes = 0

    def change():
        nonlocal changes
        turn = random.Random(0)
        while not stop.is_set():
            what = turn.randrange(4)
            if what == 0:
                backend.install_patch(variants[changes % 2], strength=turn.choice([1.0, -1.0]))
            elif what == 1 and "p" in backend.list_patches():
                backend.remove_patch("p")
            elif "p" in backend.list_patches():
                backend.set_strength("p", turn.choice([0.5, 1.0, 2.0]))
                if what == 3:
                    backend.set_schedule("p", turn.choice([None, {0: 1.0, 3: 0.0}]))
            changes += 1
            time.sleep(0.002)

    answers = []
    seen = {}

    def ask(number):
        for turn in range(requests // 6):
            prompt = (number + turn) % len(chats)
            patches = backend._resolve(None, backend.installed())
            request = Request(tuple(chats[prompt]), config, patches)
            answers.append((prompt, patches, backend._run([request])[0]))
            seen[patches.digest] = patches

    changer = threading.Thread(target=change)
    askers = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    changer.start()
    for thread in askers:
        thread.start()
    for thread in askers:
        thread.join()
    stop.set()
    changer.join()
    assert len(answers) == requests
    assert changes >= least_changes
    assert len(seen) > 4
    solo = {}
    for prompt, patches, answer in answers:
        assert answer.digest == patches.digest
        key = prompt, patches.digest
        if key not in solo:
            solo[key] = backend._run([Request(tuple(chats[prompt]), config, patches)])[0].token_ids
        assert answer.token_ids == solo[key]
    (state,) = backend.worker_state()
    assert (state["live_vectors"], state["live_requests"], state["blocks_missed"]) == (0, 0, 0)


def outputs_of(backend, prompts, parameters):
    """The engine as somebody uses it who calls vLLM by himself. `prompts`: (token ids, other keys)."""
    given = [{"prompt_token_ids": ids, **more} for ids, more in prompts]
    return backend._driver.call(lambda: backend._engine.llm.generate(given, parameters, use_tqdm=False))


def raw(backend, prompts, parameters):
    """The first token's log-probability and the tokens that came from the cache, for each prompt."""
    outputs = outputs_of(backend, prompts, parameters)
    answers = [output.outputs[0] for output in outputs]
    first = [one.logprobs[0][one.token_ids[0]].logprob for one in answers]
    return [(first[i], output.num_cached_tokens) for i, output in enumerate(outputs)]


def test_the_parameters_alone_are_safe(backend, long_prompt):
    from vllm import SamplingParams

    backend.install_patch(steering("p", norm=80.0))
    base = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True, extra_args={"mine": 1})
    steered, plain = backend.sampling_params({"p": 1}, base), backend.sampling_params({}, base)
    assert base.extra_args == {"mine": 1}
    assert plain.extra_args == {"mine": 1}
    assert set(steered.extra_args) == {"mine", "brainpatch"}
    config = GenerationConfig(max_new_tokens=6, logprobs=1, ignore_eos=True)
    backend._driver.reset_cache()
    answers = [backend.generate_detailed([long_prompt], config, patches=wish)[0] for wish in ({"p": 1}, {})]
    wanted = [one.logprobs[0][one.token_ids[0]] for one in answers]
    assert abs(wanted[0] - wanted[1]) > 0.01
    backend._driver.reset_cache()
    first = raw(backend, [(long_prompt, {})] * 2, [steered, plain])
    again = raw(backend, [(long_prompt, {})] * 2, [steered, plain])
    for found in (first, again):
        assert [logprob for logprob, _ in found] == pytest.approx(wanted, abs=1e-3)
    assert all(cached >= 256 for _, cached in again)
    salted = raw(backend, [(long_prompt, {"cache_salt": backend.cache_salt({"p": 1})})], steered)
    assert salted[0][1] >= 256  # the salt that follows anyway
    several = steered.clone()
    several.n, several.temperature, several.seed = 2, 0.01, 5  # so cold that it is nearly greedy
    (output,) = outputs_of(backend, [(long_prompt, {})], several)
    assert [list(one.token_ids)[:3] for one in output.outputs] == [answers[0].token_ids[:3]] * 2


def test_a_structured_answer_keeps_its_structure_under_a_patch(backend, chats):
    from vllm.sampling_params import StructuredOutputsParams

    backend.install_patch(steering("p", norm=80.0), enabled=False)
    config = GenerationConfig(
        max_new_tokens=12,
        extra={"structured_outputs": StructuredOutputsParams(choice=["yes", "no", "maybe"])},
    )
    wishes = [{"p": x} for x in (1, -1, 0, 0.5)]
    answers = backend.generate_detailed(chats[:4], config, patches=wishes)
    assert all(one.text in ("yes", "no", "maybe") for one in answers)
    for prompt, wish, answer in zip(chats, wishes, answers, strict=False):
        assert backend.generate_detailed([prompt], config, patches=wish)[0].text == answer.text
    free = backend.generate_detailed(chats[:4], GREEDY, patches=wishes)
    assert all(one.text not in ("yes", "no", "maybe") for one in free)


def test_the_prompts_own_logprobs_are_those_of_the_patched_model(backend, long_prompt):
    """A token's log-probability in the prompt is what it would have been as the next one."""
    from vllm import SamplingParams

    prompt = long_prompt[:40]
    backend.install_patch(steering("p", norm=60.0), enabled=False)
    backend.install_patch(steering("later", norm=60.0, site="continuation"), enabled=False)

    def of_prompt(wish):
        base = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        parameters = backend.sampling_params(wish, base)
        (output,) = outputs_of(backend, [(prompt, {})], parameters)
        return [output.prompt_logprobs[i][prompt[i]].logprob for i in range(1, len(prompt))]

    def as_next(i, wish):
        config = GenerationConfig(max_new_tokens=1, extra={"logprobs": -1})
        return backend.generate_detailed([prompt[:i]], config, patches=wish)[0].logprobs[0][prompt[i]]

    plain, patched = of_prompt({}), of_prompt({"p": 1})
    assert max(abs(a - b) for a, b in zip(plain, patched, strict=True)) > 0.1
    assert of_prompt({"later": 1}) == pytest.approx(plain, abs=1e-3)
    for i in (1, 17, 39):
        assert patched[i - 1] == pytest.approx(as_next(i, {"p": 1}), abs=1e-3)
    assert of_prompt({}) == pytest.approx(plain, abs=1e-3)


def test_what_a_caller_forges_is_refused_or_harmless(backend, long_prompt):
    from vllm import SamplingParams

    backend.install_patch(steering("p", norm=80.0))
    base = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
    steered = backend.sampling_params({"p": 1}, base)
    wanted = raw(backend, [(long_prompt, {})], steered)[0][0]
    plain = raw(backend, [(long_prompt, {})], base)[0][0]
    assert abs(wanted - plain) > 0.01
    good = steered.extra_args["brainpatch"]
    refused = backend.worker_state()[0]["refused"]
    for forged in (
        "text", {"set": "text"}, {"set": b"junk"}, {"set": good["set"][:-1]}, {**good, "more": 1},
        {**good, "tag": "x" * 65}, {"digest": "a" * 64}, 7,
        {**good, "set": forged_set(1, 8)}, {**good, "set": forged_set(99, 576)},
    ):  # fmt: skip
        parameters = base.clone()
        parameters.extra_args = {"brainpatch": forged}
        with pytest.raises(RequestError, match="BP410"):
            raw(backend, [(long_prompt, {})], parameters)
    assert backend.worker_state()[0]["refused"] == refused + 10
    salt = backend.cache_salt({"p": 1})
    for name in (salt, salt[:-1], f"{salt}x", "brainpatch:", "brainpatch::"):
        logprob, cached = raw(backend, [(long_prompt, {"cache_salt": name})], base)[0]
        assert cached == 0, name
        assert logprob == pytest.approx(plain, abs=1e-3), name
    assert raw(backend, [(long_prompt, {})], steered)[0][0] == pytest.approx(wanted, abs=1e-3)


def by_hand(backend, prompt, parameters, change):
    """A request that goes around vLLM's input processing: made by it, changed, and given to the engine."""
    engine = backend._engine.llm.llm_engine
    number = f"by-hand-{uuid.uuid4().hex}"

    def run():
        given = {"type": "token", "prompt_token_ids": prompt}
        request = engine.input_processor.process_inputs(number, given, parameters, ("generate",))
        change(request)
        engine.add_request(number, request, parameters)
        while True:
            for output in engine.step():
                if output.finished:
                    return output

    return backend._driver.call(run)


def test_a_request_made_by_hand_is_salted_and_checked_too(backend, long_prompt):
    from vllm import SamplingParams

    backend.install_patch(steering("p", norm=80.0))
    base = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
    steered = backend.sampling_params({"p": 1}, base)
    salt = backend.cache_salt({"p": 1})
    backend._driver.reset_cache()
    wanted = raw(backend, [(long_prompt, {})], base)[0][0]
    backend._driver.reset_cache()

    def named(salt):
        def change(request):
            request.cache_salt = salt

        return change

    for given in (None, "brainpatch::"):
        output = by_hand(backend, long_prompt, steered.clone(), named(given))
        assert abs(output.outputs[0].logprobs[0][output.outputs[0].token_ids[0]].logprob - wanted) > 0.01
    logprob, cached = raw(backend, [(long_prompt, {})], base)[0]
    assert (logprob, cached) == (pytest.approx(wanted, abs=1e-3), 0)
    output = by_hand(backend, long_prompt, base.clone(), named(salt))
    assert output.num_cached_tokens == 0

    def spoil(request):
        request.sampling_params.extra_args["brainpatch"]["set"] = b"junk"

    output = by_hand(backend, long_prompt, steered.clone(), spoil)
    assert output.outputs[0].finish_reason == "error"
    assert raw(backend, [(long_prompt, {})], base)[0][0] == pytest.approx(wanted, abs=1e-3)


def forged_set(layer, width):
    """A set for another model."""
    patch = make_patch([{"layer": layer}], hidden=width, layers=layer + 1)
    return wire.encode(resolve({"p": 1}, {"p": ActivePatch(patch)}))


def test_a_failure_in_the_worker_does_not_end_the_engine(backend, chats):
    with pytest.raises(EngineError, match="BP508"):
        backend._driver.rpc("bp_broken", 5)
    with pytest.raises(EngineError, match="BP502"):
        backend._driver.rpc("bp_apply_deltas", {})
    with pytest.raises(EngineError, match="BP508"):
        backend._driver.rpc("bp_no_such_method")
    assert backend.generate(chats[0], GREEDY)


def test_one_bad_request_does_not_hurt_the_others_of_its_batch(backend, chats):
    """Activations that are not numbers: that request fails by code, the other seven are right, and stay so."""
    wanted = [one.token_ids for one in backend.generate_detailed(chats, GREEDY, patches={})]
    backend.install_patch(steering("huge", (10, 12, 14), norm=3e38, coefficient=7.0))  # their sum overflows
    wishes = [{}, {}, {"huge": 1}, {}, {}, {}, {}, {}]
    for _ in range(2):
        with pytest.raises(EngineError, match=r"BP509.*huge") as caught:
            backend.generate_detailed(chats, GREEDY, patches=wishes)
        answers = caught.value.answers
        assert answers[2] is None
        assert [a.token_ids for a in answers if a] == [w for i, w in enumerate(wanted) if i != 2]
    # blocks of the broken request are handed out again
    crowd = backend.generate_detailed(chats * 6, GREEDY, patches={})
    assert [one.token_ids for one in crowd] == wanted * 6
    with pytest.raises(EngineError, match="BP509"):
        list(backend.stream(chats[0], GREEDY, patches={"huge": 1}))
    with pytest.raises(EngineError, match="BP509"):
        backend.trace(chats[0], GREEDY, patches={"huge": 1})


def test_an_interrupted_call_leaves_no_request_behind(backend, chats, monkeypatch):
    wanted = ids(backend, chats[1], GREEDY)
    submit = backend._submit
    submitted = []

    def interrupted(*arguments, **named):
        submitted.append(1)
        if len(submitted) == 3:
            raise KeyboardInterrupt
        return submit(*arguments, **named)

    monkeypatch.setattr(backend, "_submit", interrupted)
    long = GenerationConfig(max_new_tokens=500, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        backend.generate_detailed(chats[:4], long)
    monkeypatch.undo()
    assert ids(backend, chats[1], GREEDY) == wanted
    assert not backend._driver.call(backend._engine.llm.llm_engine.has_unfinished_requests)
