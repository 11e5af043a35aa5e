# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401, F811 (fixtures of other files)
"""Servers that give nonsense, no end or half a page: an error that names it, never a figure made of it."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_serving import Engine, Handler, measure, no_waiting, start

from dflash_hf import serving as server_http
from dflash_hf.prompts import EvaluationPrompt
from dflash_hf.serving import LONGEST_RETRY_AFTER, AnswerError, CompletionServer, Server, ServerError, _retry_after


DRAFTS, SLOTS = "spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_per_pos_total"
SECRET = "sk-very-secret"


@pytest.fixture
def edit(monkeypatch):
    """Changes what an engine gives: its metrics page, its information, or each chunk of an answer."""

    def change(method, function):
        original = getattr(Engine, method)
        monkeypatch.setattr(Engine, method, lambda self, *args: function(original(self, *args)))

    return change


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-5", "1e400", "abc"])
@pytest.mark.parametrize("name", [DRAFTS, SLOTS])
def test_a_counter_that_is_no_count_is_named(start, edit, name, value):
    edit("metrics", lambda page: page and re.sub(rf"({name}\{{[^}}]*\}}) \S+", rf"\1 {value}", page))
    with pytest.raises(ServerError, match=rf"does not say what it verified: it gives .* as vllm:{name[:-6]}"):
        measure(start("vllm")[1], "easy 1")


def test_slots_that_are_missing_between_others_are_named(start, edit):
    edit("metrics", lambda page: page and page.replace('position="1"', 'position="99999999999"'))
    with pytest.raises(ServerError, match=r"count the slots \[0, 2, 99999999999\], of which some are missing"):
        measure(start("vllm")[1], "easy 1")


@pytest.mark.parametrize(
    "page",
    [
        lambda page: page.replace("\n", "\r\n"),
        lambda page: page.replace("Qwen/Qwen3.6-27B", 'a}b\\" c{d'),
        lambda page: re.sub(r"(\} [\d.]+)\n", r"\1 1700000000000\n", page).replace("} ", "}\t"),
        lambda page: page + "# filling\n" * 200_000,
    ],
    ids=["other line ends", "braces in labels", "times and tabs", "two megabytes"],
)
def test_odd_pages_are_read(start, edit, page):
    edit("metrics", lambda text: text and page(text))
    assert measure(start("vllm")[1], "easy 1").verifications.acceptance_length == 3.0


@pytest.mark.parametrize(
    "states",
    ["x", [None], *([{"avg_spec_accept_length": v}] for v in ("2.5", float("nan"), 0.5, -3))],
    ids=str,
)
def test_information_that_is_none_is_named(start, edit, states):
    edit("server_info", lambda info: info and info | {"internal_states": states})
    with pytest.raises(ServerError, match="does not say what it verified: it"):
        measure(start("sglang")[1], "easy 1")


def with_part(chunk, name, value):
    """A chunk with another part, wherever it has one of that name."""
    if isinstance(chunk, dict):
        return {k: value if k == name and v is not None else with_part(v, name, value) for k, v in chunk.items()}
    return [with_part(item, name, value) for item in chunk] if isinstance(chunk, list) else chunk


@pytest.mark.parametrize(
    ("kinds", "name", "values"),
    [
        (("vllm", "sglang"), "usage", [[1], "x"]),
        (("vllm", "sglang"), "completion_tokens", [None, "13", -3, 1.5, True]),
        (("vllm", "sglang"), "choices", [[None], ["x"], {"a": 1}]),
        (("vllm", "sglang"), "content", [["x"], 3, {"text": "x"}]),
        (("vllm",), "delta", ["x", [1]]),
        (("vllm",), "metrics", ["x", [1]]),
        (("vllm",), "speculative_decoding", ["x", {"num_spec_steps": 1}]),
        (("vllm",), "num_spec_steps", [None, -4, float("nan"), "4"]),
        (("vllm",), "acceptance_histogram", [[1, 2], {"x": 1}, {"-1": 1}, {"1": None}, {"99999999999": 1}]),
        (("sglang",), "meta_info", ["x", [1], {"spec_verify_ct": 4, "spec_accept_histogram": "abc"}]),
        (("sglang",), "spec_verify_ct", [None, "4", -4, 400]),
    ],
)
def test_answers_of_another_form_are_errors(start, edit, kinds, name, values):
    edit("answer", lambda chunks: [with_part(chunk, name, given[-1]) for chunk in chunks])
    for kind in kinds:
        _, url = start(kind, per_request=True)
        for value in values:
            given = [value]
            with pytest.raises(ServerError, match=r"answered 'easy 1' (in another form|with an answer that breaks)"):
                measure(url, "easy 1")


def respond(monkeypatch, path, function):
    """Lets the server answer one page in its own way."""
    get = Handler.do_GET

    def do_get(self):
        if self.path != path:
            return get(self)
        function(self)
        self.close_connection = True

    monkeypatch.setattr(Handler, "do_GET", do_get)


@pytest.mark.parametrize("hangs", [False, True])
def test_an_error_whose_text_does_not_come_is_still_the_error(start, monkeypatch, hangs):
    release = threading.Event()

    def fail(self):
        self.wfile.write(b"HTTP/1.1 500 Oops\r\nContent-Length: 100\r\n\r\noops")
        if hangs:
            release.wait(5)

    respond(monkeypatch, "/metrics", fail)
    with pytest.raises(ServerError, match="/metrics answered with status 500"):
        Server(start("vllm")[1], timeout=0.2)
    release.set()

    def fail_at_once(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.wfile.write(b"HTTP/1.1 500 Oops\r\nContent-Length: 100\r\n\r\n")
        self.close_connection = True

    monkeypatch.setattr(Handler, "do_POST", fail_at_once)
    with pytest.raises(AnswerError, match="failed 1 times, the last time with status 500"):
        CompletionServer(start("vllm")[1] + "/v1", retries=0).answer({"messages": []})


def dribble(self):
    self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(200):
        try:
            self.wfile.write(b"6\r\n: abc\n\r\n")
        except OSError:
            return
        threading.Event().wait(0.05)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_what_comes_to_no_end_is_not_waited_for(start, monkeypatch, kind):
    _, url = start(kind)
    server, begin = Server(url, timeout=0.5), time.monotonic()
    monkeypatch.setattr(
        Handler, "do_POST", lambda self: (self.rfile.read(int(self.headers["Content-Length"])), dribble(self))
    )
    with pytest.raises(ServerError, match=r"gave nothing for 0\.5 seconds, or came to no end"):
        server.ask(EvaluationPrompt([{"role": "user", "content": "easy 1"}]), {})
    with pytest.raises(AnswerError, match=r"no end within 0\.5 seconds"):
        CompletionServer(url + "/v1", timeout=0.5, retries=0).answer({"messages": []})
    respond(monkeypatch, "/v1/models", dribble)
    with pytest.raises(ServerError, match="came to no end"):
        Server(url, timeout=0.5)
    assert time.monotonic() - begin < 5


def test_a_page_that_is_too_large_or_cut_off_is_an_error(start, monkeypatch):
    monkeypatch.setattr(server_http, "LARGEST_PAGE", 100_000)
    respond(monkeypatch, "/metrics", lambda self: self.send("# filling\n" * 20_000))
    with pytest.raises(ServerError, match="more than"):
        Server(start("vllm")[1], timeout=5)
    page = Engine("vllm").metrics()
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(page) + 1}\r\n\r\n"
    respond(monkeypatch, "/metrics", lambda self: self.wfile.write((head + page).encode()))
    with pytest.raises(ServerError, match="broke off"):
        Server(start("vllm")[1], timeout=5)


def test_a_key_that_cannot_be_sent_is_not_repeated(start, monkeypatch):
    _, url = start("vllm")
    monkeypatch.setenv("OPENAI_API_KEY", f"{SECRET}\n")
    assert measure(url, "easy 1").verifications.acceptance_length == 3.0
    for key in f"{SECRET}\nx", f"{SECRET}\u20ac":
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with pytest.raises(ServerError, match="OPENAI_API_KEY holds characters that no HTTP header may hold") as error:
            Server(url)
        assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    "address",
    [
        "http://local host:80",
        "http://localhost:abc",
        "http://localhost:99999",
        "http://[::1",
        "http://l\xf6/\xe4",
        "http://",
    ],
)
def test_an_address_of_a_wrong_form_is_refused_before_it_is_asked(address):
    for make in Server, CompletionServer:
        with pytest.raises((ServerError, ValueError), match="is no address of a server"):
            make(address)


@pytest.mark.parametrize("address", [f"http://u:{SECRET}@localhost:8000", f"http://localhost:8000/v1?key={SECRET}"])
def test_an_address_with_a_secret_is_refused_without_repeating_it(address):
    with pytest.raises(ServerError, match="holds credentials or a query") as error:
        Server(address)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("value", ["inf", "1e9", "999999999999", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_no_server_makes_a_run_sleep_for_days(value):
    assert _retry_after(value) == LONGEST_RETRY_AFTER


@pytest.mark.parametrize("value", ["nan", "Fri, 31 Dec 9999 23:59:59 -2359", "Mon, 99 Foo 2020"])
def test_a_retry_after_that_is_none_is_passed_over(value):
    assert _retry_after(value) in (None, LONGEST_RETRY_AFTER)


def test_who_stops_asking_does_not_wait_for_the_answers(start, monkeypatch):
    release = threading.Event()
    post = Handler.do_POST

    def answer(self):
        if "slow" in json.loads(self.rfile.peek(1)[: int(self.headers["Content-Length"])])["messages"][0]["content"]:
            release.wait(10)
            self.close_connection = True
            return
        post(self)

    monkeypatch.setattr(Handler, "do_POST", answer)
    server, begin = CompletionServer(start("sglang")[1] + "/v1", retries=0), time.monotonic()
    bodies = [(k, {"messages": [{"role": "user", "content": text}]}) for k, text in enumerate(["slow", "easy"])]
    answers = server.answer_all(bodies, concurrency=2)
    assert next(answers)[0] == 1
    answers.close()
    assert time.monotonic() - begin < 5
    release.set()


def test_ctrl_c_ends_a_run_whose_server_hangs(start, monkeypatch, tmp_path):
    asked, release = threading.Event(), threading.Event()

    def hang(self):
        asked.set()
        release.wait(60)
        self.close_connection = True

    monkeypatch.setattr(Handler, "do_POST", hang)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi"}\n' * 3)
    recipe = Path(__file__).parents[1] / "recipes" / "generate_completions.py"
    words = ["--server", start("sglang")[1] + "/v1", "--target", "m", "--prompts", str(tmp_path / "prompts.jsonl")]
    # Tests that a shell runs in the background ignore Ctrl-C, and what they start inherits that.
    ignored_or_not = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, str(recipe), *words, "--output", str(tmp_path / "out.jsonl")],
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, ignored_or_not)
    try:
        assert asked.wait(60)
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=10)
    finally:
        process.kill()
        release.set()
    assert process.returncode == 1 and "interrupted: what is answered stays" in printed
