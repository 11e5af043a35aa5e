# SPDX-License-Identifier: Apache-2.0
"""`dflash-hf generate`: that answers are what the target writes alone, resuming, and servers that fail."""

import datetime
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pytest
import torch
from killing import run_and_kill
from tiny import byte_tokenizer, dense_target, hybrid_target, refused
from transformers import AutoModelForCausalLM

from dflash_hf import command_generate, tokenize_conversation, tokenize_files
from dflash_hf.chats import RowError, read_chats
from dflash_hf.cli import parse_config
from dflash_hf.command_generate import CompletionArguments, answer_prompts, match_keys, prompt_key, scan_answered
from dflash_hf.documents import format_summary
from dflash_hf.prompts import read_prompts
from dflash_hf.serving import AnswerError, CompletionServer
from dflash_hf.writing import AnotherWriterError, only_writer


torch.set_num_threads(1)

SMOLLM2 = Path(__file__).resolve().parents[1] / "recipes" / "smollm2-135m"
END_OF_TURN = 258
USER = {"role": "user", "content": "why?"}
OLD = {"role": "assistant", "content": "the old answer"}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A tiny dense target on disk whose checkpoint also asks for penalties, which are not to count."""
    folder = tmp_path_factory.mktemp("target")
    model = dense_target()
    model.generation_config.eos_token_id = END_OF_TURN
    model.generation_config.repetition_penalty = 5.0
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path) -> Path:
    """Seven prompts of four lengths, two of them the same, one with earlier turns and one with a field of its own."""
    rows = [{"prompt": text} for text in ("why?", "who?", "what is it", "why?", "a", "where is it")]
    rows[1]["split"] = "test"
    turns = [("system", "s"), ("user", "u"), ("assistant", "v"), ("user", "w")]
    rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    return write(tmp_path / "prompts.jsonl", rows)


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(target: Path, prompts: Path, output: str = "completions.jsonl", status: int = 0, **overrides) -> list[dict]:
    path = prompts.parent / output
    defaults = {"device": "cpu", "max_new_tokens": 12, "batch_size": 2}
    assert answer_prompts(CompletionArguments(str(target), str(prompts), str(path), **{**defaults, **overrides})) == (
        status
    )
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def asked(monkeypatch) -> list:
    """The token ids of the prompts that a target loaded here is asked."""
    asked, generate = [], command_generate.generate
    monkeypatch.setattr(
        command_generate, "generate", lambda model, batch, seed: asked.extend(batch) or generate(model, batch, seed)
    )
    return asked


def greedy_alone(folder: Path, messages: list[dict], max_new_tokens: int) -> list[int]:
    """The naive twin: one prompt, the best token of one uncached forward at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = byte_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    answer: list[int] = []
    with torch.no_grad():
        while len(answer) < max_new_tokens and END_OF_TURN not in answer:
            logits = model(torch.tensor([prompt + answer]), use_cache=False).logits
            answer.append(int(logits[0, -1].argmax()))
    return answer


# --- a target that is loaded here ---


def test_rows_are_what_the_target_writes_alone(target, prompts):
    rows = run(target, prompts)
    assert [row["messages"][0]["content"] for row in rows if row.get("split") == "test"] == ["who?"]
    tokenizer = byte_tokenizer()
    for row, prompt in zip(rows, read_prompts(prompts), strict=True):
        ids, answer = row["completion_token_ids"], row["messages"][-1]
        assert ids == greedy_alone(target, prompt.messages, 12)
        assert row["finish_reason"] == ("stop" if ids[-1] == END_OF_TURN else "length")
        assert END_OF_TURN not in ids[:-1]
        assert answer == {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}


def test_an_answer_keeps_its_end_of_turn_and_nothing_after_it(target, prompts, tmp_path):
    before = {json.dumps(row["messages"][:-1]): row["completion_token_ids"] for row in run(target, prompts)}
    # A random target seldom stops, so a token that it does write is made its second end-of-sequence token.
    stop_id = Counter(token for ids in before.values() for token in ids[2:]).most_common(1)[0][0]
    model = AutoModelForCausalLM.from_pretrained(target)
    model.generation_config.eos_token_id = [END_OF_TURN, stop_id]
    model.save_pretrained(tmp_path / "stops")
    byte_tokenizer().save_pretrained(tmp_path / "stops")
    rows = run(tmp_path / "stops", prompts, "stopped.jsonl")
    assert "stop" in {row["finish_reason"] for row in rows}
    for row in rows:
        whole = before[json.dumps(row["messages"][:-1])]
        assert row["completion_token_ids"] == whole[: whole.index(stop_id) + 1] if stop_id in whole else whole


def test_a_killed_run_is_taken_up_where_it_stopped(target, prompts, asked):
    whole = run(target, prompts)
    asked.clear()
    output = prompts.parent / "completions.jsonl"
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:3]) + lines[3][: len(lines[3]) // 2])
    assert run(target, prompts) == whole and len(asked) == len(whole) - 3
    assert output.read_bytes() == b"".join(lines)
    # Rows of other prompts stay.
    write(prompts, [{"prompt": "why?"}, {"prompt": "new"}])
    assert len(run(target, prompts)) == 8


def test_sampling_follows_the_seed(target, prompts):
    sampled = [run(target, prompts, f"{i}.jsonl", temperature=1.5, seed=seed) for i, seed in enumerate((1, 1, 2))]
    assert sampled[0] == sampled[1] != sampled[2]


def test_a_hybrid_target_answers_padded_prompts_as_it_does_alone(prompts, tmp_path):
    folder = tmp_path / "hybrid"
    hybrid_target().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    for row, prompt in zip(run(folder, prompts, batch_size=7), read_prompts(prompts), strict=True):
        assert row["completion_token_ids"] == greedy_alone(folder, prompt.messages, 12)


def test_parquet_is_answered_and_taken_up_by_prompt(target, tmp_path, asked):
    """Fields of types that JSON lacks are kept as text."""
    rows = [{"prompt": text, "day": datetime.date(2026, 7, 1)} for text in ("why?", "who?", "what is it")]
    (tmp_path / "in").mkdir()
    datasets.Dataset.from_list(rows[:2]).to_parquet(tmp_path / "in" / "a.parquet")
    first = run(target, tmp_path / "in", "out.jsonl")
    assert [(row["messages"][0]["content"], row["day"][:10]) for row in first] == [
        ("why?", "2026-07-01"),
        ("who?", "2026-07-01"),
    ]
    datasets.Dataset.from_list(rows[2:]).to_parquet(tmp_path / "in" / "b.parquet")
    asked.clear()
    assert run(target, tmp_path / "in", "out.jsonl")[:2] == first and len(asked) == 1


def test_r4_only_what_the_target_wrote_is_to_be_learned(target, tmp_path, asked):
    """A log is answered again, its earlier answers being those of another model."""
    chat = [USER, OLD, {"role": "user", "content": "who?"}]
    log = {"request": {"messages": chat, "model": "other"}, "response": {"choices": [{"message": OLD}]}, "id": 3}
    path = write(tmp_path / "log.jsonl", [log, {"messages": [*chat, OLD], "completion_token_ids": [7]}])
    for row in run(target, path, drop_answers=True):
        assert [message.get("train") for message in row["messages"]] == [None, False, None, None]
        assert row["messages"][-1] != OLD and row.keys() <= {"id", "messages", "finish_reason", "completion_token_ids"}
        assert row["completion_token_ids"] == greedy_alone(target, chat, 12)
        assert [chat.completion_ids for chat in read_chats(row)] == [row["completion_token_ids"]]
    asked.clear()
    run(target, path, drop_answers=True)
    assert not asked


def test_r3_a_bad_row_never_ends_a_run(tmp_path, capsys):
    """Rows without a prompt, with an answer at the end, that the template fails on or that are too long are named."""
    fails = "{% if messages[0]['content'] == 'raise' %}{{ raise_exception('no') }}{% endif %}"
    model, tokenizer = (
        dense_target(max_position_embeddings=100),
        byte_tokenizer(fails + byte_tokenizer().chat_template),
    )
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    image = {**USER, "content": [{"type": "image_url", "image_url": {}}]}
    empty = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": ""}}]}
    rows = [{"prompt": "why?"}, {}, {"messages": [USER, OLD]}, {"prompt": "raise"}, {"prompt": "x" * 99}]
    rows += [{"messages": [image]}, {"messages": [USER, empty, {"role": "tool", "content": "12"}]}]
    path = write(tmp_path / "prompts.jsonl", rows)
    path.write_text(path.read_text() + "not JSON\n")
    answered = run(tmp_path / "target", path, status=1)
    assert [row["messages"][0]["content"] for row in answered] == ["why?", "why?"]
    said = capsys.readouterr().err
    for number in (2, 3, 4, 5, 6):
        assert f"prompts.jsonl:{number}" in said
    with refused(ValueError, "prompts.jsonl:1"):
        run(tmp_path / "target", write(path, [{}]))


# --- what is refused ---


@pytest.mark.parametrize("prompts", ["in", "in/*.jsonl", "*/answers*"])
def test_an_output_that_would_be_read_as_prompts_is_refused(tmp_path, monkeypatch, prompts):
    monkeypatch.chdir(tmp_path)
    with refused(ValueError, "in/answers.jsonl"):
        CompletionArguments("t", prompts, "in/answers.jsonl")
    CompletionArguments("t", prompts, "out/others.jsonl")


@pytest.mark.parametrize("content", ["a note", "{}\nnote", '{"messages": [5]}\n', '{"prompt": "a"}\n', "[]\n"])
def test_an_output_that_holds_something_else_is_refused(target, prompts, content):
    output = prompts.parent / "completions.jsonl"
    output.write_text(content)
    with refused(ValueError, output):
        run(target, prompts)
    assert output.read_text() == content


def test_an_output_of_other_settings_is_refused(target, prompts):
    run(target, prompts, temperature=0.6)
    with refused(ValueError, "temperature", 0.6, 0.7):
        run(target, prompts, temperature=0.7)
    settings = prompts.parent / "completions.jsonl.settings.json"
    settings.write_text('{"target')
    with refused(ValueError, settings):
        run(target, prompts, temperature=0.6)


def test_targets_that_cannot_answer_are_refused_before_anything_is_written(prompts, tmp_path):
    with refused(OSError, "nowhere"):
        run(tmp_path / "nowhere", prompts)
    byte_tokenizer(chat_template=None).save_pretrained(tmp_path / "plain")
    dense_target().save_pretrained(tmp_path / "plain")
    with refused(ValueError, "chat template"):
        run(tmp_path / "plain", prompts)
    assert not (prompts.parent / "completions.jsonl").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"batch_size": 0},
        {"temperature": -1.0},
        {"top_p": 0.9},
        {"concurrency": 4},
        {"return_token_ids": False},
        {"dtype": "float32", "server": "http://localhost:1"},
        {"server": "localhost"},
        {"output": "p"},
        {"output": "s3://bucket/out"},
    ],
)
def test_options_that_are_wrong_or_do_nothing_are_refused(options):
    with refused(ValueError, next(iter(options))):
        CompletionArguments(**{"target": "t", "prompts": "p", "output": "o", **options})


def test_two_runs_do_not_answer_into_one_file(tmp_path):
    output = tmp_path / "out.jsonl"
    output.touch()
    arguments = CompletionArguments("m", "p", str(output))
    with only_writer(output, "output"), refused(AnotherWriterError, "output"), command_generate.open_output(arguments):
        pytest.fail("wrote")


def test_the_command_line_takes_the_documented_arguments():
    line = "--target t --prompts p --output o --max_new_tokens 8 --temperature 0.7 --top_p 0.9 --batch_size 4 --seed 3"
    assert parse_config(CompletionArguments, line.split()) == (CompletionArguments("t", "p", "o", 8, 0.7, 0.9, 4, 3),)


# --- a server that fails, stalls, closes connections and limits the rate ---


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
def server(monkeypatch):
    monkeypatch.setattr(command_generate, "CompletionServer", partial(CompletionServer, first_wait=0.02))
    with serving() as server:
        yield server


def url_of(server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/v1"


def ask(server, prompts: Path, **overrides) -> tuple[int, list[dict]]:
    return ask_at(url_of(server), prompts, **overrides)


def ask_at(url: str, prompts: Path, **overrides) -> tuple[int, list[dict]]:
    output = prompts.parent / "completions.jsonl"
    options = {"server": url, "concurrency": 8, "timeout": 0.4, "retries": 4, "max_new_tokens": 32, **overrides}
    status = answer_prompts(CompletionArguments("m", str(prompts), str(output), **options))
    return status, [json.loads(line) for line in output.read_text().splitlines()]


def texts_of(rows: list[dict]) -> list[str]:
    return [row["messages"][0]["content"] for row in rows]


def prompts_of(folder: Path, texts) -> Path:
    return write(folder / "prompts.jsonl", [{"prompt": text} for text in texts])


KINDS = ("fine", "fails", "limited", "stalls", "closes", "half")


def test_every_prompt_is_answered_exactly_once(server, tmp_path):
    texts = [f"{kind} {number}" for number in range(6) for kind in KINDS]
    status, rows = ask(server, prompts_of(tmp_path, texts))
    assert status == 0 and texts_of(rows) == texts
    for text, row in zip(texts, rows, strict=True):
        answer = {"content": f"answer to {text}", "reasoning_content": f"on {text}"}
        assert row["messages"][1] == {"role": "assistant", **answer}
        assert row["finish_reason"] == "stop" and row["completion_token_ids"] == [1, 2, 258]
    expected = {"fine": 1, "fails": 3}
    assert server.asked == {text: expected.get(text.split()[0], 2) for text in texts}
    assert 2 <= server.most <= 8
    # What was written can be tokenised as it is.
    (document,) = tokenize_conversation(rows[0], byte_tokenizer())
    assert document["input_ids"][-3:] == [1, 2, 258]
    before = Counter(server.asked)
    assert ask(server, tmp_path / "prompts.jsonl") == (0, rows) and server.asked == before


def test_an_answer_of_no_known_form_is_asked_again(server, tmp_path):
    status, rows = ask(server, prompts_of(tmp_path, ["odd"]), retries=len(ODD_ANSWERS))
    assert status == 0 and rows[0]["messages"][1]["content"] == "answer to odd"
    assert server.asked["odd"] == len(ODD_ANSWERS) + 1


def test_nothing_of_an_earlier_answer_stays_in_a_row(server, tmp_path, capsys):
    old = {"finish_reason": "length", "completion_token_ids": [7], "output_ids": [7], "response": "old"}
    bare = {"role": "user", "content": "bare"}
    path = write(
        tmp_path / "prompts.jsonl",
        [
            {"prompt": "bare", "messages": None, "tools": None, "chat_template_kwargs": None, "source": "s", **old},
            {"messages": [bare], "completion": "old", "reasoning_content": "old"},
        ],
    )
    status, rows = ask(server, path)
    messages = [bare, {"role": "assistant", "content": "x"}]
    answer = {"messages": messages, "finish_reason": "stop", "stop_reason": "\n\n"}
    assert status == 0 and rows == [{**answer, "source": "s"}, answer]
    # What the server counts stands where it gives no ids.
    assert "14 tokens" in capsys.readouterr().out
    # A stop sequence is no end of turn.
    (document,) = tokenize_conversation(rows[0], byte_tokenizer())
    assert byte_tokenizer().decode(document["input_ids"]).endswith("assistant\nx")
    # Rows of an earlier version, which kept what was null.
    before = Counter(server.asked)
    write(tmp_path / "completions.jsonl", [{**row, "tools": None} for row in rows])
    assert ask(server, path)[0] == 0 and server.asked == before


def test_requests_carry_the_settings_and_the_key(server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    tools = [{"type": "function", "function": {"name": "f"}}]
    path = write(tmp_path / "prompts.jsonl", [{"messages": [{"role": "user", "content": "fine"}], "tools": tools}])
    _, rows = ask(server, path, temperature=0.6, top_p=0.9, seed=3, enable_thinking=False)
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
    assert "secret" not in "".join(file.read_text() for file in tmp_path.iterdir())


def test_unanswered_prompts_are_named_and_asked_again(server, tmp_path, capsys):
    path = prompts_of(tmp_path, ["fine 1", "refused 2", "down 3", "fine 4"])
    server.is_down = True
    status, rows = ask(server, path, retries=1)
    assert status == 1 and texts_of(rows) == ["fine 1", "fine 4"]
    err = capsys.readouterr().err
    assert f"{path}:2 " in err and "400" in err and f"{path}:3 " in err and "503" in err
    assert server.asked["refused 2"] == 1
    server.is_down = False
    assert texts_of(ask(server, path, retries=1)[1]) == ["fine 1", "down 3", "fine 4"]
    assert server.asked["fine 1"] == server.asked["fine 4"] == 1


def test_a_server_that_goes_away_ends_the_run_and_what_is_answered_stays(server, tmp_path):
    texts = [*(f"fine {number}" for number in range(10)), *(f"down {number}" for number in range(200))]
    server.is_down = True
    with refused(AnswerError, url_of(server)):
        ask(server, prompts_of(tmp_path, texts[10:110]), retries=0)
    path = prompts_of(tmp_path, texts)
    with refused(AnswerError, url_of(server)):
        ask(server, path, retries=0, concurrency=2)
    assert sum(server.asked.values()) < 80
    server.is_down = False
    status, rows = ask(server, path)
    assert status == 0 and texts_of(rows) == texts
    assert all(server.asked[text] == 1 for text in texts[:10])


def test_refused_prompts_alone_end_no_run(server, tmp_path):
    texts = ["fine 1", *(f"refused {number}" for number in range(30)), "fine 2"]
    status, rows = ask(server, prompts_of(tmp_path, texts), concurrency=1)
    assert status == 1 and texts_of(rows) == ["fine 1", "fine 2"]


def test_a_killed_run_of_a_server_goes_on(server, tmp_path):
    texts = [f"slow {number}" for number in range(60)]
    path, output = prompts_of(tmp_path, texts), tmp_path / "completions.jsonl"
    run_and_kill(lambda: output.exists() and output.read_bytes().count(b"\n") >= 15, ask_at, url_of(server), path)
    assert 15 <= output.read_bytes().count(b"\n") < 60
    status, rows = ask(server, path)
    assert status == 0 and texts_of(rows) == texts
    # Only what was under way when the run was killed is asked twice.
    assert 60 <= sum(server.asked.values()) <= 60 + 8


def test_ctrl_c_ends_a_run_whose_server_hangs(monkeypatch, tmp_path):
    asked, release = threading.Event(), threading.Event()

    def hang(self):
        asked.set()
        release.wait(60)
        self.close_connection = True

    monkeypatch.setattr(Handler, "do_POST", hang)
    path = prompts_of(tmp_path, ["Hi"] * 3)
    with serving() as server:
        words = ["--server", url_of(server), "--target", "m", "--prompts", path, "--output", tmp_path / "out.jsonl"]
        program = "from dflash_hf.command_generate import main; main()"
        # Tests that a shell runs in the background ignore Ctrl-C, and what they start inherits that.
        ignored_or_not = signal.signal(signal.SIGINT, signal.default_int_handler)
        command = [sys.executable, "-c", program, *map(str, words)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        signal.signal(signal.SIGINT, ignored_or_not)
        try:
            assert asked.wait(60)
            process.send_signal(signal.SIGINT)
            _, printed = process.communicate(timeout=10)
        finally:
            process.kill()
            release.set()
    assert process.returncode == 1 and "interrupted" in printed


# --- what goes with answering ---


@pytest.mark.parametrize(
    "response",
    [
        'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: [DONE]\n\n',
        [{"choices": [{"delta": {"content": "a"}}]}],
        {"object": "chat.completion.chunk", "choices": [{"delta": {"content": "a"}}]},
    ],
)
def test_a_streamed_answer_is_named_as_what_it_is(response):
    """Such a request is to be answered again."""
    with refused(RowError, "streamed", "generate"):
        read_chats({"request": {"messages": [USER]}, "response": response})


def test_answers_of_several_models_are_told_of(tmp_path):
    """A gateway's log holds those of others than the target, which a drafter is not to learn from."""
    response = {"model": "other", "choices": [{"message": OLD}]}
    rows = [{"request": {"messages": [{**USER, "content": f"{i}?"}]}, "response": {**response}} for i in range(3)]
    alike = tokenize_files(write(tmp_path / "alike.jsonl", rows), tmp_path / "alike", byte_tokenizer())
    assert alike["models"] == {"other": 3} and "qwen" not in format_summary(alike)
    rows[1]["response"]["model"] = "qwen"
    mixed = tokenize_files(write(tmp_path / "mixed.jsonl", rows), tmp_path / "mixed", byte_tokenizer())
    assert mixed["models"] == {"other": 2, "qwen": 1} and "qwen" in format_summary(mixed)


def test_the_recipes_completions_answer_all_its_prompts():
    prompts, path = read_prompts(SMOLLM2 / "prompts.jsonl"), SMOLLM2 / "completions.jsonl"
    assert Counter(prompt.fields["split"] for prompt in prompts) == {"train": 320, "test": 40}
    matched, others = match_keys([prompt_key(p) for p in prompts], [key for _, key in scan_answered(path)])
    assert not others and list(matched.values()) == list(range(len(prompts)))
    for row in map(json.loads, path.read_text().splitlines()):
        assert 0 < len(row["completion_token_ids"]) <= 128 and 2 not in row["completion_token_ids"][:-1]
        assert (row["finish_reason"] == "stop") == (row["completion_token_ids"][-1] == 2)
