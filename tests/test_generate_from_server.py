# SPDX-License-Identifier: Apache-2.0
"""Answers from an OpenAI-compatible server that fails, stalls, closes connections and limits the rate."""

import json
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from killing import run_and_kill
from test_generate_completions import load_recipe
from tiny import byte_tokenizer

from dflash_hf.serving import AnswerError, CompletionServer, _retry_after
from dflash_hf.tokenizing import tokenize_conversation


recipe = load_recipe(Path(__file__).resolve().parents[1] / "recipes" / "generate_completions.py")
STALL = 1.0
ODD_ANSWERS = ([], {"error": "x"}, {"choices": "abc"}, {"choices": [5]}, {"choices": {"a": 1}}, {"choices": [{}]})


class Handler(BaseHTTPRequestHandler):
    """Answers each prompt with its own text, after it has done what the first word of the prompt asks for."""

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.asked[text] += 1
            self.server.bodies.append((body, self.headers.get("Authorization")))
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
            attempt = self.server.asked[text]
        try:
            self.answer(text, text.split()[0], attempt)
        finally:
            with self.server.lock:
                self.server.running -= 1

    def answer(self, text: str, kind: str, attempt: int) -> None:
        if kind == "refused" or (kind == "down" and self.server.is_down):
            return self.send(400 if kind == "refused" else 503, {"error": "no"})
        if attempt < 3 and kind == "fails":
            return self.send(500, {"error": "broken"})
        if attempt < 2 and kind == "limited":
            return self.send(429, {"error": "slow down"}, {"Retry-After": "0.05"})
        if attempt < 2 and kind == "stalls":
            time.sleep(STALL)
            return None
        if attempt < 2 and kind == "closes":
            return self.connection.close()
        if attempt < 2 and kind == "half":
            return self.send(200, None)
        if attempt < 2 and kind == "empty":
            return self.send(200, {"choices": []})
        if kind == "odd" and attempt <= len(ODD_ANSWERS):
            return self.send(200, ODD_ANSWERS[attempt - 1])
        if kind == "bare":
            choice = {"message": {"content": "x"}, "finish_reason": "stop", "stop_reason": "\n\n", "token_ids": None}
            return self.send(200, {"choices": [choice], "usage": {"completion_tokens": 7}})
        if kind == "slow":
            time.sleep(0.05)
        message = {"role": "assistant", "content": f"answer to {text}", "reasoning_content": f"on {text}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": [1, 2, 258]}
        return self.send(200, {"choices": [choice]})

    def send(self, status: int, value, headers=None) -> None:
        content = json.dumps(value).encode() if value is not None else b'{"choices": ['
        self.send_response(status)
        for name, header in {**(headers or {}), "Content-Length": str(len(content) + 50 * (value is None))}.items():
            self.send_header(name, header)
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.lock, server.asked, server.bodies = threading.Lock(), Counter(), []
    server.running, server.most, server.is_down = 0, 0, False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def server():
    with serving() as server:
        yield server


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(recipe, "CompletionServer", lambda *a: CompletionServer(*a, first_wait=0.02))


def write_prompts(folder: Path, texts) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def url_of(server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/v1"


def run(server, prompts: Path, **overrides) -> tuple[int, list[dict]]:
    return run_at(url_of(server), prompts, **overrides)


def run_at(url: str, prompts: Path, **overrides) -> tuple[int, list[dict]]:
    output = prompts.parent / "completions.jsonl"
    options = {"server": url, "concurrency": 8, "timeout": 0.4, "retries": 4, "max_new_tokens": 32, **overrides}
    status = recipe.main(recipe.CompletionArguments("m", str(prompts), str(output), **options))
    return status, [json.loads(line) for line in output.read_text().splitlines()]


KINDS = ("fine", "fails", "limited", "stalls", "closes", "half", "empty")


def test_every_prompt_is_answered_exactly_once(server, tmp_path):
    texts = [f"{kind} {number}" for number in range(6) for kind in KINDS]
    status, rows = run(server, write_prompts(tmp_path, texts))
    assert status == 0
    assert [row["messages"][0]["content"] for row in rows] == texts
    for text, row in zip(texts, rows, strict=True):
        assert row["messages"][1] == {
            "role": "assistant",
            "content": f"answer to {text}",
            "reasoning_content": f"on {text}",
        }
        assert row["finish_reason"] == "stop" and row["completion_token_ids"] == [1, 2, 258]
    expected = {"fine": 1, "fails": 3}
    assert server.asked == {text: expected.get(text.split()[0], 2) for text in texts}
    assert 2 <= server.most <= 8
    # What was written can be tokenised as it is.
    (document,) = tokenize_conversation(rows[0], byte_tokenizer())
    assert document["input_ids"][-3:] == [1, 2, 258]
    before = Counter(server.asked)
    assert run(server, tmp_path / "prompts.jsonl") == (0, rows) and server.asked == before


def test_an_answer_of_no_known_form_is_asked_again(server, tmp_path):
    status, rows = run(server, write_prompts(tmp_path, ["odd"]), retries=len(ODD_ANSWERS))
    assert status == 0 and rows[0]["messages"][1]["content"] == "answer to odd"
    assert server.asked["odd"] == len(ODD_ANSWERS) + 1


def test_nothing_of_an_earlier_answer_stays_in_a_row(server, tmp_path, capsys):
    old = {"finish_reason": "length", "completion_token_ids": [7], "output_ids": [7], "response": "old"}
    prompts = [
        {"prompt": "bare", "messages": None, "tools": None, "chat_template_kwargs": None, "source": "s", **old},
        {"messages": [{"role": "user", "content": "bare"}], "completion": "old", "reasoning_content": "old"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"".join(json.dumps(prompt).encode() + b"\n" for prompt in prompts))
    status, rows = run(server, path)
    messages = [{"role": "user", "content": "bare"}, {"role": "assistant", "content": "x"}]
    answer = {"messages": messages, "finish_reason": "stop", "stop_reason": "\n\n"}
    assert status == 0 and rows == [{**answer, "source": "s"}, answer]
    # What the server counts stands where it gives no ids.
    assert "2 answers of 14 tokens" in capsys.readouterr().out
    # A stop sequence is no end of turn.
    (document,) = tokenize_conversation(rows[0], byte_tokenizer())
    assert byte_tokenizer().decode(document["input_ids"]).endswith("assistant\nx")
    before = Counter(server.asked)
    assert run(server, path) == (0, rows) and server.asked == before
    # Rows of an earlier version, which kept what was null.
    output = tmp_path / "completions.jsonl"
    output.write_text("".join(json.dumps({**row, "tools": None}) + "\n" for row in rows))
    assert run(server, path)[0] == 0 and server.asked == before


@pytest.mark.parametrize(
    "content", ["a note", "{}\nnote", '{"messages": [5]}\n', '{"messages": {"a": 1}}\n', "{}\n", "[]\n"]
)
def test_a_file_that_is_no_output_is_left_as_it_is(server, tmp_path, content):
    output = tmp_path / "completions.jsonl"
    output.write_text(content)
    with pytest.raises(ValueError, match=r"not an answered row|no output of this command"):
        run(server, write_prompts(tmp_path, ["fine"]))
    assert output.read_text() == content and not server.asked


def test_settings_that_cannot_be_read_are_named(server, tmp_path):
    path = write_prompts(tmp_path, ["fine"])
    run(server, path)
    (tmp_path / "completions.jsonl.settings.json").write_text('{"target')
    with pytest.raises(ValueError, match=r"completions\.jsonl\.settings\.json.* cannot be read"):
        run(server, path)


def test_requests_carry_the_settings_and_the_key(server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    tools = [{"type": "function", "function": {"name": "f"}}]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "fine"}], "tools": tools}) + "\n")
    _, rows = run(server, path, temperature=0.6, top_p=0.9, seed=3, enable_thinking=False)
    ((body, key),) = server.bodies
    assert key == "Bearer secret"
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "fine"}],
        "max_tokens": 32,
        "temperature": 0.6,
        "top_p": 0.9,
        "seed": 3,
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": False},
        "return_token_ids": True,
    }
    assert rows[0]["chat_template_kwargs"] == {"enable_thinking": False} and rows[0]["tools"] == tools
    written = "".join(file.read_text() for file in tmp_path.iterdir())
    assert "secret" not in written
    settings = json.loads((tmp_path / "completions.jsonl.settings.json").read_text())
    assert settings["temperature"] == 0.6 and settings["enable_thinking"] is False and settings["target"] == "m"
    with pytest.raises(ValueError, match=r"other settings \(temperature: 0.6 then, 0.7 now\)"):
        run(server, path, temperature=0.7, top_p=0.9, seed=3, enable_thinking=False)


def test_unanswered_prompts_are_named_and_asked_again(server, tmp_path, capsys):
    path = write_prompts(tmp_path, ["fine 1", "refused 2", "down 3", "fine 4"])
    server.is_down = True
    status, rows = run(server, path, retries=1)
    assert status == 1 and [row["messages"][0]["content"] for row in rows] == ["fine 1", "fine 4"]
    err = capsys.readouterr().err
    assert "prompt 2 stays unanswered: the server refused the request (status 400" in err
    assert "prompt 3 stays unanswered: the server failed 2 times, the last time with status 503" in err
    assert server.asked["refused 2"] == 1
    server.is_down = False
    status, rows = run(server, path, retries=1)
    assert [row["messages"][0]["content"] for row in rows] == ["fine 1", "down 3", "fine 4"]
    assert server.asked["fine 1"] == server.asked["fine 4"] == 1


def test_a_server_that_is_not_there_ends_the_run(server, tmp_path):
    path = write_prompts(tmp_path, [f"down {number}" for number in range(100)])
    server.is_down = True
    with pytest.raises(AnswerError, match=r"Nothing at http://127\.0\.0\.1.* answers"):
        run(server, path, retries=0)
    assert sum(server.asked.values()) < 40


def test_a_server_that_goes_away_ends_the_run_and_what_is_answered_stays(server, tmp_path):
    texts = [*(f"fine {number}" for number in range(10)), *(f"down {number}" for number in range(200))]
    path = write_prompts(tmp_path, texts)
    server.is_down = True
    with pytest.raises(AnswerError, match=r"answers any more"):
        run(server, path, retries=0, concurrency=2)
    assert sum(server.asked.values()) < 40
    server.is_down = False
    status, rows = run(server, path)
    assert status == 0 and [row["messages"][0]["content"] for row in rows] == texts
    assert all(server.asked[text] == 1 for text in texts[:10])


def test_refused_prompts_alone_end_no_run(server, tmp_path):
    texts = ["fine 1", *(f"refused {number}" for number in range(30)), "fine 2"]
    status, rows = run(server, write_prompts(tmp_path, texts), concurrency=1)
    assert status == 1 and [row["messages"][0]["content"] for row in rows] == ["fine 1", "fine 2"]


def test_a_killed_run_goes_on(server, tmp_path):
    texts = [f"slow {number}" for number in range(60)]
    path = write_prompts(tmp_path, texts)
    output = tmp_path / "completions.jsonl"
    run_and_kill(lambda: output.exists() and output.read_bytes().count(b"\n") >= 15, run_at, url_of(server), path)
    answered = output.read_bytes().count(b"\n")
    assert 15 <= answered < 60
    status, rows = run(server, path)
    assert status == 0 and [row["messages"][0]["content"] for row in rows] == texts
    # Only what was under way when the run was killed is asked twice.
    assert 60 <= sum(server.asked.values()) <= 60 + 8


@pytest.mark.parametrize(("value", "seconds"), [("2", 2.0), ("0.5", 0.5), ("-1", 0.0), ("soon", None), (None, None)])
def test_retry_after(value, seconds):
    assert _retry_after(value) == seconds
    assert _retry_after("Fri, 01 Jan 2100 00:00:00 GMT") >= 0 and _retry_after("Thu, 01 Jan 1970 00:00:00 GMT") == 0
