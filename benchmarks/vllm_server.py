#!/usr/bin/env python3
"""What patches cost in vLLM's own server: the same load on a plain one and on `brainpatch serve`, as ratios.

Both servers run, and one at a time gets the load: rounds alternate, and which is first changes. A load is CLIENTS
clients that send REQUESTS chats in all, 12 configurations by field and by name mixed with plain ones on the patched
server, and the same prompts without patches on the plain one. A ratio is speed: below 1 is slower than plain.

    python benchmarks/vllm_server.py --model MODEL --json server.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
NAMES = ("one", "two", "three", "four")
STRENGTHS = (1.0, 0.5, -1.0)
QUESTIONS = ("Tell me about the sea.", "How was your day?", "What should I cook?", "Why is the sky blue?")


def patch_files(folder: Path, hidden: int, layers: int) -> list[str]:
    """Four patches of one random direction at a middle block."""
    import brainpatch.patch as bp

    files = []
    for seed, name in enumerate(NAMES):
        drawn = np.random.default_rng(seed).standard_normal(hidden)
        base = bp.BaseModelSpec(MODEL_ID, "LlamaForCausalLM", hidden, layers)
        manifest = bp.Manifest(name, base, [bp.Intervention(layers // 2, "v")])
        files.append(str(bp.save_patch(manifest, {"v": drawn.tolist()}, folder / f"{name}.brainpatch")))
    return files


class Server:
    """A server in a process of its own."""

    def __init__(self, words: list[str], log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words, "--port", str(port)]
                if "--" not in words
                else _before(words, port),
                stdout=out,
                stderr=out,
                env={**os.environ, "VLLM_LOGGING_LEVEL": "WARNING"},
            )
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(log.read_text()[-3000:])
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.5)

    def close(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def _before(words: list[str], port: int) -> list[str]:
    at = words.index("--")
    return [sys.executable, "-m", *words[:at], "--port", str(port), *words[at:]]


def load(
    server: Server, patched: bool, clients: int, requests: int, tokens: int, seed: int
) -> dict[str, Any]:
    """Send the load; seconds of all and of each request."""
    todo = list(range(requests))
    seconds: list[float] = []

    def client() -> None:
        with httpx.Client(base_url=server.url, timeout=600) as http:
            while True:
                try:
                    number = todo.pop()
                except IndexError:
                    return
                turn = random.Random(f"{seed} {number}")
                body: dict[str, Any] = {
                    "model": "m",
                    "messages": [{"role": "user", "content": f"{number} {turn.choice(QUESTIONS)}"}],
                    "max_tokens": tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                name, strength, way = turn.choice(NAMES), turn.choice(STRENGTHS), turn.randrange(3)
                if patched and way == 0:
                    body["brainpatch"] = {name: strength}
                elif patched and way == 1:
                    body["model"] = f"m+{name}@{strength}"
                started = time.perf_counter()
                answer = http.post("/v1/chat/completions", json=body)
                answer.raise_for_status()
                seconds.append(time.perf_counter() - started)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = time.perf_counter() - started
    seconds.sort()
    return {"whole": whole, "p50": seconds[len(seconds) // 2], "p95": seconds[len(seconds) * 95 // 100]}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=192, help="of one load")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = json.loads((Path(options.model) / "config.json").read_text())
    own = ["--max-model-len", "512", "--max-num-seqs", "64"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        files = patch_files(folder, config["hidden_size"], config["num_hidden_layers"])
        serve = ["brainpatch", "serve", "-m", options.model, "--model-id", MODEL_ID, "--dtype", "float32"]
        serve += [
            "--served-model-name",
            "m",
            "--default-off",
            *(word for file in files for word in ("-p", file)),
        ]
        plain = ["vllm.entrypoints.openai.api_server", "--model", options.model, "--dtype", "float32"]
        plain += ["--served-model-name", "m", "--enforce-eager", *own]
        servers = {
            "plain": Server(plain, folder / "plain.log"),
            "patched": Server([*serve, "--", *own], folder / "patched.log"),
        }
        rounds = []
        try:
            for number in range(options.rounds + 1):
                found = {}
                for name in ("plain", "patched") if number % 2 else ("patched", "plain"):
                    found[name] = load(
                        servers[name],
                        name == "patched",
                        options.clients,
                        options.requests,
                        options.tokens,
                        number,
                    )
                if number:  # the first one warms up
                    rounds.append(found)
                    print(f"round {number}: {found}", file=sys.stderr, flush=True)
        finally:
            for server in servers.values():
                server.close()
    rows = {}
    for what in ("whole", "p50", "p95"):
        ratios = [one["plain"][what] / one["patched"][what] for one in rounds]
        rows[what] = (statistics.median(ratios), min(ratios), max(ratios))
    rate = {
        name: options.requests / statistics.median(one[name]["whole"] for one in rounds) for name in servers
    }
    print(f"requests/s: plain {rate['plain']:.2f}, patched {rate['patched']:.2f}")
    for what, (median, low, high) in rows.items():
        print(f"{what}: ratio {median:.3f} ({low:.3f}..{high:.3f})")
    if options.json is not None:
        options.json.write_text(
            json.dumps({"rounds": rounds, "ratios": rows, "requests_per_second": rate}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
