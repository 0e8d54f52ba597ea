"""Engines of other kinds: speculation, adapters, more ranks and replicas, and ones that the caller built.

Each is started here, and what it answers is compared with the shared engine, or with Transformers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brainpatch.backends.vllm_backend import VLLMBackend
from brainpatch.backends.vllm_engine import EXTENSION
from brainpatch.backends.vllm_plugin import WORKER
from brainpatch.errors import CapabilityError, EngineError, RequestError
from brainpatch.patch.manifest import BaseModelSpec
from brainpatch.runtime import GenerationConfig
from tests.engines.vllm.conftest import alone
from tests.engines.vllm.material import ARGUMENTS, MODEL_ID, assert_close, edits_of, log_softmax, steering
from tests.engines.vllm.test_families import HIDDEN, LAYERS, PROMPT, tiny_model
from tests.factories import make_patch

pytestmark = [pytest.mark.vllm, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(2400)]

CONFIG = GenerationConfig(max_new_tokens=24, logprobs=5, ignore_eos=True)
WISHES: list[dict[str, Any]] = [
    {},
    {"a": 1},
    {"b": -0.7},
    {"a": {"strength": 1, "schedule": {"0": 1, "5": 0}}},
    {"c": 1},
    {"a": 0.5, "c": {"strength": 1, "schedule": {"keyframes": {"0": 0, "9": 1}, "interpolate": True}}},
    {"b": 1, "d": 1},
    {"d": 1},
]


PATCHES = (
    steering("a"),
    steering("b", (3, 20)),
    steering("c", (9,), site="continuation"),
    steering("d", (12,), site="prompt"),
)


def install(backend: VLLMBackend) -> None:
    for patch in PATCHES:
        backend.install_patch(patch, enabled=False)


@pytest.fixture
def wanted(slot, chats):
    """What the shared engine answers, each prompt alone; then it is down."""
    engine = slot.engine()
    install(engine)
    answers = [
        engine.generate_detailed([prompt], CONFIG, patches=wish)[0]
        for prompt, wish in zip(chats, WISHES, strict=True)
    ]
    slot.release()
    return answers


def agree(answers, wanted) -> None:
    """The same tokens, and log-probabilities that differ by rounding."""
    assert [one.digest for one in answers] == [one.digest for one in wanted]
    for number, (ours, theirs) in enumerate(zip(answers, wanted, strict=True)):
        assert ours.token_ids == theirs.token_ids, number
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert_close(one, other, atol=2e-3)


def at_rest(states) -> None:
    for state in states:
        assert (state["live_requests"], state["live_vectors"], state["blocks_missed"]) == (0, 0, 0)
        assert state["blocks_edited"] > 0


def test_drafts_that_are_rejected_change_no_answer(wanted, chats, model_folder):
    """Speculation computes rows that are thrown away, whose positions come again."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with VLLMBackend() as backend:
        backend.load_model(
            model_folder, model_id=MODEL_ID, **ARGUMENTS, speculative_config=drafts, disable_log_stats=False
        )
        install(backend)
        agree(backend.generate_detailed(chats, CONFIG, patches=WISHES), wanted)
        metrics = {one.name: one for one in backend._driver.call(backend._engine.llm.get_metrics)}
        drafted = metrics["vllm:spec_decode_num_draft_tokens"].value
        accepted = metrics["vllm:spec_decode_num_accepted_tokens"].value
        assert drafted > accepted > 0
        at_rest(backend.worker_state())


def test_two_ranks_answer_as_one(free_slot, model_folder, tmp_path, monkeypatch):
    """Tensor parallel: every rank adds the whole vector to its copy of the stream, once. A tiny random model:
    the nine heads of the real one cannot be shared by two."""
    tiny_model("llama", tmp_path / "model", model_folder)
    spec = BaseModelSpec("test/tiny", "", HIDDEN, LAYERS)
    patches = [
        make_patch(
            [{"layer": layer, "site": site}],
            name=name,
            hidden=HIDDEN,
            layers=LAYERS,
            base_model=spec,
            seed=layer,
        )
        for name, layer, site in (("a", 0, "all"), ("b", 1, "continuation"), ("c", 2, "prompt"))
    ]
    ramp = {"strength": 1, "schedule": {"keyframes": {"0": 0, "9": 1}, "interpolate": True}}
    wishes = [{}, {"a": 1}, {"b": -1}, {"c": 1}, {"a": ramp, "b": 0.5}]
    prompts = [PROMPT[i:] for i in range(len(wishes))]
    found = []
    for ranks in (1, 2):
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1" if ranks == 2 else "auto")
        with VLLMBackend() as backend:
            backend.load_model(
                tmp_path / "model",
                model_id="test/tiny",
                **{**ARGUMENTS, "max_model_len": 128},
                tensor_parallel_size=ranks,
            )
            for patch in patches:
                backend.install_patch(patch, enabled=False)
            found.append(backend.generate_detailed(prompts, CONFIG, patches=wishes))
            states = backend.worker_state()
            assert len(states) == ranks
            at_rest(states)
            for row in backend.trace(PROMPT, GenerationConfig(max_new_tokens=3), patches={"a": 1}):
                assert row.norm == pytest.approx(row.expected, rel=1e-4)
    agree(found[1], found[0])
    assert len({tuple(one.token_ids) for one in found[0]}) == len(wishes)


def own_engine(folder: Path, **arguments: Any) -> dict[str, Any]:
    return {"model": str(folder), **ARGUMENTS, **arguments}


@contextmanager
def own_llm(folder: Path, **arguments: Any) -> Iterator[Any]:
    """An `LLM` that somebody built; it ends here."""
    from vllm import LLM

    llm = LLM(**own_engine(folder, **arguments))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_async_engine_of_the_callers(wanted, chats, model_folder, monkeypatch, tokenizer, replicas):
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1" if replicas == 2 else "auto")
    arguments = own_engine(model_folder, worker_cls=WORKER, data_parallel_size=replicas)
    broken = steering("broken", (10, 12, 14), norm=3e38, coefficient=7.0)

    async def run():
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        try:
            backend = VLLMBackend.from_llm(llm, model_id=MODEL_ID)
            install(backend)
            backend.install_patch(broken, enabled=False)

            async def text(prompt, wish):
                return "".join([piece async for piece in backend.astream(prompt, CONFIG, patches=wish)])

            texts = await asyncio.gather(
                *(text(prompt, wish) for prompt, wish in zip(chats, WISHES, strict=True))
            )
            answers = await asyncio.to_thread(backend.generate_detailed, chats, CONFIG, patches=WISHES)
            # On every replica, wherever the request went.
            for prompt in chats[: 2 * replicas]:
                with pytest.raises(EngineError, match="BP509"):
                    await text(prompt, {"broken": 1})
            later = await text(chats[1], WISHES[1])
            forged = SamplingParams(max_tokens=1, extra_args={"brainpatch": {"set": b"junk"}})
            with pytest.raises(RequestError, match="BP410"):
                async for _ in llm.generate({"prompt_token_ids": chats[0]}, forged, "forged"):
                    pass
            return texts, answers, later, await asyncio.to_thread(backend.worker_state)
        finally:
            llm.shutdown()

    texts, answers, later, states = asyncio.run(run())
    agree(answers, wanted)
    right = [tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in wanted]
    assert texts == right
    assert later == right[1]
    assert len(states) == replicas
    at_rest(states)


def test_an_engine_of_the_callers(wanted, chats, model_folder):
    """With the worker class, by `generate` of its own; the worker extension that it was given is kept."""
    from vllm import SamplingParams

    with own_llm(
        model_folder, worker_cls=WORKER, worker_extension_cls="tests.engines.vllm.test_modes.Extension"
    ) as llm:
        backend = VLLMBackend.from_llm(llm, model_id=MODEL_ID)
        install(backend)
        base = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        parameters = [backend.sampling_params(wish, base) for wish in WISHES]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in chats], parameters, use_tqdm=False)
        assert [list(one.outputs[0].token_ids) for one in outputs] == [one.token_ids for one in wanted]
        assert llm.collective_rpc("extension_says") == ["hello"]
        at_rest(backend.worker_state())
        backend.unload()
        assert llm.collective_rpc("extension_says") == ["hello"]


class Extension:
    """Somebody else's."""

    def extension_says(self):
        return "hello"


def test_an_engine_with_the_extension_alone(wanted, chats, model_folder):
    with own_llm(model_folder, worker_extension_cls=EXTENSION) as llm:
        backend = VLLMBackend.from_llm(llm, model_id=MODEL_ID)
        for patch in PATCHES[:2]:
            backend.install_patch(patch, enabled=False)
        agree(backend.generate_detailed(chats[:3], CONFIG, patches=WISHES[:3]), wanted[:3])
        with pytest.raises(CapabilityError, match="BP502"):
            backend.install_patch(PATCHES[2], enabled=False)  # a site
        with pytest.raises(CapabilityError, match="BP502"):
            backend.generate_detailed([chats[0]], CONFIG, patches=WISHES[3])  # a schedule
        with pytest.raises(CapabilityError, match="BP502"):
            backend.sampling_params({"a": 1})


def test_an_engine_that_is_not_ours_is_refused(free_slot, model_folder):
    with own_llm(model_folder) as llm, pytest.raises(CapabilityError, match=r"BP502.*worker_cls"):
        VLLMBackend.from_llm(llm)


def adapter(folder: Path, rank: int = 8) -> dict[str, np.ndarray]:
    """A LoRA adapter with random weights; returns what it adds to each weight, by name."""
    from safetensors.numpy import save_file

    folder.mkdir()
    generator = np.random.default_rng(3)
    tensors, added = {}, {}
    for layer in range(30):
        for part, out in (("q_proj", 576), ("v_proj", 192)):
            down = generator.normal(0, 0.03, (rank, 576)).astype(np.float32)
            up = generator.normal(0, 0.03, (out, rank)).astype(np.float32)
            name = f"model.layers.{layer}.self_attn.{part}"
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
            added[f"{name}.weight"] = 2.0 * up @ down
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": rank,
                "lora_alpha": 2 * rank,
                "target_modules": ["q_proj", "v_proj"],
                "bias": "none",
                "base_model_name_or_path": MODEL_ID,
            }
        )
    )
    return added


def test_patches_beside_adapters(free_slot, chats, model_folder, tmp_path):
    """A LoRA adapter and a patch in one request, beside each alone, against merged weights in Transformers."""
    import torch
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    added = adapter(tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.no_grad():
        for name, change in added.items():
            model.get_parameter(name).add_(torch.from_numpy(change))
    model.save_pretrained(tmp_path / "merged")
    edits = edits_of(steering("b", (3, 20)))
    references = {}
    for kind, folder in (("merged", tmp_path / "merged"), ("base", model_folder)):
        runs = [{"ids": chats[0], "new": 1, "edits": wish} for wish in ({}, edits)]
        question = {"model": str(folder), "blocks": "model.layers", "runs": runs}
        references[kind] = np.load(alone("plain_transformers.py", question, tmp_path / f"{kind}.npz"))
    lora = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    # One more place than adapters: on a CPU, vLLM (0.32) gives rows without an adapter what is in the last place.
    arguments = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with own_llm(model_folder, worker_cls=WORKER, **arguments) as llm:
        backend = VLLMBackend.from_llm(llm, model_id=MODEL_ID)
        install(backend)
        base = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
        plain, steered = backend.sampling_params({}, base), backend.sampling_params({"b": 1}, base)
        outputs = llm.generate(
            [{"prompt_token_ids": chats[0]}] * 4,
            [plain, steered, plain, steered],
            lora_request=[lora, lora, None, None],
            use_tqdm=False,
        )
    for output, kind, run in zip(outputs, ("merged", "merged", "base", "base"), (0, 1, 0, 1), strict=True):
        theirs = log_softmax(references[kind][f"logits_{run}"])
        (entry,) = output.outputs[0].logprobs
        ours = np.array([entry[token].logprob for token in range(len(theirs))])
        np.testing.assert_allclose(ours, theirs, atol=5e-3, err_msg=f"{kind} {run}")
    firsts = [output.outputs[0].logprobs[0][0].logprob for output in outputs]
    assert len({round(value, 2) for value in firsts}) == 4  # the four cases are four


def test_plain_and_patched_engines_take_turns_in_one_compile_cache(
    wanted, chats, model_folder, tmp_path, monkeypatch
):
    """Plain, patched, plain, patched, all compiled, with one cache folder: right, and warm the second time."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    arguments = {**ARGUMENTS, "enforce_eager": False}
    plain_ids, found = [], []
    for turn in range(2):
        question = {
            "model": str(model_folder),
            "arguments": arguments,
            "prompts": chats[:1],
            "parameters": {"temperature": 0.0, "max_tokens": 24, "logprobs": 5, "ignore_eos": True},
            "full": chats[:1],
        }
        file = alone("plain_vllm.py", question, tmp_path / f"plain{turn}.json")
        plain_ids.append(json.loads(file.read_text())["answers"][0]["token_ids"])
        with VLLMBackend() as backend:
            backend.load_model(model_folder, model_id=MODEL_ID, **arguments)
            install(backend)
            agree(backend.generate_detailed(chats, CONFIG, patches=WISHES), wanted)
            (state,) = backend.worker_state()
            assert state["compiled"]
            at_rest([state])
        folder = tmp_path / "cache" / "torch_compile_cache"
        entries = [*folder.iterdir(), *(folder / "torch_aot_compile").glob("*")]
        found.append(sorted(one.name for one in entries if one.is_dir() and one.name != "torch_aot_compile"))
    assert plain_ids == [wanted[0].token_ids] * 2
    assert len(found[0]) == 2  # an entry for each
    assert found[1] == found[0]
