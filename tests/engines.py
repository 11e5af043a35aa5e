# SPDX-License-Identifier: Apache-2.0
"""vLLM and SGLang as they answer over HTTP, replayed on the loopback."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


VLLM_PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="Qwen/Qwen3.6-27B"}} 0.0
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="Qwen/Qwen3.6-27B"}} 5123.0
"""
VLLM_SPECULATION = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="Qwen/Qwen3.6-27B"}} {drafts}
vllm:spec_decode_num_drafts_created{{engine="0",model_name="Qwen/Qwen3.6-27B"}} 1.76e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="Qwen/Qwen3.6-27B"}} {draft_tokens}
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="Qwen/Qwen3.6-27B"}} {accepted}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="Qwen/Qwen3.6-27B",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="Qwen/Qwen3.6-27B",position="1"}} {second}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="Qwen/Qwen3.6-27B",position="2"}} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{{engine="0",model_name="Qwen/Qwen3.6-27B",position="2"}} 1.76e+09
"""
SGLANG_PAGE = """\
# HELP sglang:generation_tokens_total Number of generation tokens processed.
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{model_name="Qwen/Qwen3.6-27B"}} {tokens}
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{{model_name="Qwen/Qwen3.6-27B"}} {served}
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{{model_name="Qwen/Qwen3.6-27B"}} 9.9
"""


class Engine:
    """What a replayed server has counted, and how it behaves.

    An answer has 13 tokens: the prefill's, and 12 from four verifications that accept 8 drafts. Its source "hard" has
    as many from six verifications that accept 6.
    """

    def __init__(self, kind, **behaviour):
        self.kind, self.behaviour = kind, behaviour
        # What was served before.
        self.drafts, self.accepted, self.first, self.second, self.tokens, self.served = 100, 40, 30, 10, 150, 10
        self.requests = []
        self.lock = threading.Lock()

    def metrics(self):
        if self.kind == "vllm":
            page = VLLM_PAGE if self.behaviour.get("plain") else VLLM_PAGE + VLLM_SPECULATION
        elif self.kind == "sglang" and self.behaviour.get("metrics", True):
            page = SGLANG_PAGE
        else:
            return None
        names = ("drafts", "accepted", "first", "second", "tokens", "served")
        return page.format(**{n: float(vars(self)[n]) for n in names}, draft_tokens=3.0 * self.drafts)

    def server_info(self):
        if self.kind != "sglang":
            return None
        length = (self.drafts + self.accepted) / self.drafts if self.drafts else 0.0
        state = {"last_gen_throughput": 31.4, "avg_spec_accept_length": length}
        algorithm = None if self.behaviour.get("plain") else "DFLASH"
        return {"version": "0.5.23", "speculative_algorithm": algorithm, "internal_states": [state]}

    def answer(self, body):
        """Chunks of an answer, after counting it."""
        rounds, accepted = (6, 6) if "hard" in body["messages"][-1]["content"] else (4, 8)
        with self.lock:
            self.requests.append(body)
            if not self.behaviour.get("unused"):
                self.drafts, self.accepted = self.drafts + rounds, self.accepted + accepted
                self.first, self.second, self.tokens = self.first + 4, self.second + 3, self.tokens + 13
                self.served += 1
            if self.behaviour.get("reset"):
                self.drafts = self.accepted = self.first = self.second = 1
        usage = {"prompt_tokens": 9, "completion_tokens": 13, "total_tokens": 22}
        if self.kind == "vllm":
            last = {"choices": [], "usage": usage}
            if self.behaviour.get("per_request"):
                histogram = {"0": rounds - 4, "1": 1, "2": 2, "3": 1} if rounds == 6 else {"1": 1, "2": 2, "3": 1}
                last["metrics"] = {
                    "speculative_decoding": {
                        "num_spec_steps": rounds,
                        "num_accepted_draft_tokens": accepted,
                        "num_draft_tokens": 3 * rounds,
                        "acceptance_histogram": histogram,
                    }
                }
            texts = [{"role": "assistant", "content": ""}, {"reasoning_content": "Hm. "}, {"content": "Yes"}]
            return [{"choices": [{"index": 0, "delta": delta}], "usage": None} for delta in texts] + [last]
        choice = {"index": 0, "message": {"role": "assistant", "content": "Yes"}, "finish_reason": "stop"}
        if self.behaviour.get("per_request"):
            choice["meta_info"] = {
                "completion_tokens": 13,
                "spec_verify_ct": rounds,
                "spec_accept_length": 13 / rounds,
            }
        return [{"choices": [choice], "usage": usage}]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def send(self, content, status=200):
        if content is None:
            content, status = "Not Found", 404
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        engine = self.server.engine
        pages = {"/metrics": engine.metrics, "/server_info": engine.server_info}
        pages["/v1/models"] = lambda: {"object": "list", "data": [{"id": "Qwen/Qwen3.6-27B"}]}
        self.send(pages.get(self.path, lambda: None)())

    def do_POST(self):
        engine = self.server.engine
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        refuses = engine.behaviour.get("refuses")
        if "status" in engine.behaviour or (refuses and refuses in body["messages"][-1]["content"]):
            self.send({"error": {"message": "max_tokens is too large"}}, engine.behaviour.get("status", 400))
            return
        chunks = engine.answer(body)
        if "sleep" in engine.behaviour:
            time.sleep(engine.behaviour["sleep"])
        if not body.get("stream"):
            self.send(chunks[0])
            return
        chunks = chunks[:-1] if engine.behaviour.get("cut") else chunks
        lines = ["data: " + json.dumps(chunk) for chunk in chunks] + ["data: [DONE]"]
        self.send(": keep-alive\n\n" + "\n\n".join(lines) + "\n\n")


@contextmanager
def start_engine() -> Iterator[Callable]:
    """A function that starts a replayed engine and returns it with its address."""
    servers = []

    def run(kind, **behaviour):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        server.engine = Engine(kind, **behaviour)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server.engine, f"http://127.0.0.1:{server.server_port}"

    yield run
    for server in servers:
        server.shutdown()
        server.server_close()
