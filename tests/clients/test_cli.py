"""The `draftline` command: flags, text, --json, failures and exit codes, with and without a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from draftline.cli.app import build_app
from draftline.v1 import common_pb2
from grpc_health.v1 import health_pb2
from typer.testing import CliRunner

from tests.clients.fake_service import NGRAM, STORY, Failure, FakeService, Step

ESCAPE = "\x1b["


def run(service: FakeService, command: str, *arguments: str, stdin: str | None = None):
    return CliRunner().invoke(build_app(), [command, "--server", service.address, *arguments], input=stdin)


def test_generate_streams_text_and_tells_statistics_apart(service: FakeService):
    result = run(service, "generate", "--prompt", "hello", "--max-tokens", "9")
    assert result.exit_code == 0, result.output
    assert result.stdout == STORY[:9].decode() + "\n"
    assert result.stderr.count("\n") == 1
    assert "9 tokens in 2.50 s | 3.6 tokens/s | first token 0.50 s" in result.stderr
    assert "ngram: 6 of 8 draft tokens accepted (75%), acceptance length 4.00" in result.stderr
    assert "finish: length" in result.stderr
    assert ESCAPE not in result.output


def test_every_flag_reaches_its_field(service: FakeService):
    flags = (
        "--prompt p --temperature 0.5 --top-k 3 --top-p 0.75 --min-p 0.25 --presence-penalty -1 "
        "--frequency-penalty 0.5 --repetition-penalty 1.25 --logit-bias 5=-100 --logit-bias 6=2.5 --seed 7 "
        "--max-tokens 9 --min-tokens 2 --stop a --stop b --stop-token-id 4 --stop-token-id 5 --include-stop "
        "--ignore-eos --speculation draft-model --num-draft-tokens 3 --acceptance-rule typical "
        "--typical-epsilon 0.125 --typical-delta 0.5 --threshold 0.75 --logprobs 2 --prompt-logprobs 0 --json --n 2 "
        "--priority -1 --cache-salt s --request-id id-1 --special-tokens --timeout 20"
    )
    result = run(service, "generate", *flags.split())
    assert result.exit_code == 0, result.output
    request = service.requests[0]
    sampling, stopping = request.sampling_params, request.stopping
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.75, 0.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 0.5)
    assert (sampling.repetition_penalty, sampling.seed) == (1.25, 7)
    assert dict(sampling.logit_bias) == {5: -100, 6: 2.5}
    assert (stopping.max_tokens, stopping.min_tokens) == (9, 2)
    assert list(stopping.stop) == ["a", "b"]
    assert list(stopping.stop_token_ids) == [4, 5]
    assert stopping.include_stop
    assert stopping.ignore_eos
    speculation = request.speculation
    assert speculation.method == common_pb2.SPECULATION_METHOD_DRAFT_MODEL
    assert speculation.acceptance_rule == common_pb2.ACCEPTANCE_RULE_TYPICAL
    assert speculation.max_draft_tokens == 3
    assert (speculation.typical_epsilon, speculation.typical_delta, speculation.threshold) == (
        0.125,
        0.5,
        0.75,
    )
    assert request.output.logprobs == 2
    assert request.output.HasField("prompt_logprobs")
    assert request.output.special_tokens
    assert (request.n, request.priority, request.cache_salt, request.request_id) == (2, -1, "s", "id-1")


def test_speculation_off(service: FakeService):
    result = run(service, "generate", "--prompt", "p", "--speculation", "off")
    assert service.requests[0].speculation.method == common_pb2.SPECULATION_METHOD_DISABLED
    assert "nothing drafted" in result.stderr


def test_prompts_from_file_stdin_and_chat(service: FakeService, tmp_path: Path):
    (tmp_path / "prompt.txt").write_text("from a file\n", encoding="utf-8")
    run(service, "generate", "--prompt-file", str(tmp_path / "prompt.txt"))
    run(service, "generate", "--prompt-file", "-", stdin="piped")
    run(service, "generate", "--chat", "hi", "--system", "be brief")
    run(service, "generate", "--prompt", "")
    file, stdin, chat, empty = (request.prompt for request in service.requests)
    assert file.text == "from a file\n"
    assert stdin.text == "piped"
    assert [(turn.role, turn.content) for turn in chat.chat.messages] == [
        ("system", "be brief"),
        ("user", "hi"),
    ]
    assert empty.WhichOneof("content") == "text"


def test_json_is_one_object(service: FakeService):
    result = run(service, "generate", "--prompt", "hi", "--json", "--logprobs", "1", "--stop", "dog")
    found = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert found["text"].encode() == bytes(found["token_ids"]) == STORY[:12]
    assert found["finish_reason"] == "stop"
    assert found["matched_stop"] == "dog"
    assert found["usage"] == {"prompt_tokens": 2, "cached_tokens": 1, "completion_tokens": 12}
    assert found["speculation"]["method"] == "ngram"
    assert found["speculation"]["num_accepted_tokens"] == 9
    assert found["speculation"]["acceptance_length"] == 4.0
    assert found["timing"] == {
        "queue_seconds": 0.001,
        "time_to_first_token_seconds": 0.5,
        "total_seconds": 2.5,
        "num_steps": 4,
        "num_preemptions": 1,
    }
    assert len(found["logprobs"]) == 12
    assert found["logprobs"][0]["top"] == [{"token_id": STORY[0], "logprob": -0.25}]
    assert "samples" not in found


@pytest.mark.parametrize("flag", ["--logprobs", "--prompt-logprobs"])
def test_what_only_json_can_show_is_refused_without_it(service: FakeService, flag: str):
    result = run(service, "generate", "--prompt", "hi", flag, "1")
    assert result.exit_code == 2
    assert flag in result.stderr
    assert "--json" in result.stderr
    assert not service.requests


def test_json_of_several_samples_and_no_speculation(service: FakeService):
    flags = ["--json", "--n", "2", "--speculation", "off", "--prompt-logprobs", "0"]
    found = json.loads(run(service, "generate", "--prompt", "hi", *flags).stdout)
    assert [sample["index"] for sample in found["samples"]] == [0, 1]
    assert found["samples"][0]["text"] == found["text"]
    assert found["speculation"] is None
    assert found["prompt_logprobs"][0] == {"token_id": 7, "logprob": None, "top": []}


def test_several_samples_are_printed_whole(service: FakeService):
    result = run(service, "generate", "--prompt", "hi", "--n", "2", "--max-tokens", "3")
    assert result.stdout == "[0]\nThe\n[1]\nThe\n"
    assert [line[:4] for line in result.stderr.splitlines()] == ["[0] ", "[1] "]


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_failed_call_is_one_line_and_exit_code_1(service: FakeService, as_json):
    service.script.failures.append(
        Failure(
            grpc.StatusCode.INVALID_ARGUMENT,
            "2.0 is\nabove 1",
            reason="INVALID_FIELD",
            field="sampling_params.top_p",
        )
    )
    result = run(service, "generate", "--prompt", "x", "--top-p", "2", *as_json)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        "error: INVALID_ARGUMENT (INVALID_FIELD): sampling_params.top_p: 2.0 is above 1\n"
    )


def test_a_stream_that_breaks_off_keeps_its_text_and_exits_1(service: FakeService):
    service.script.failures.append(Failure(grpc.StatusCode.UNAVAILABLE, "worker lost", after_events=2))
    result = run(service, "generate", "--prompt", "x")
    assert result.exit_code == 1
    assert result.stdout == "T\n"
    assert result.stderr == "error: UNAVAILABLE: worker lost\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["generate", "--prompt", "a", "--chat", "b"],
        ["generate", "--prompt", "a", "--system", "b"],
        ["generate", "--prompt", "a", "--speculation", "eagle9"],
        ["generate", "--prompt", "a", "--acceptance-rule", "mostly"],
        ["generate", "--prompt", "a", "--logit-bias", "5"],
        ["generate", "--prompt", "a", "--logit-bias", "x=1"],
        ["generate", "--prompt", "a", "--top-k", "-1"],
        ["generate", "--prompt", "a", "--temperature", "hot"],
        ["generate", "--prompt", "a", "--n", "0"],
        ["generate", "--prompt-file", "/nowhere/at/all"],
        ["generate", "--nonsense"],
        ["bench"],
        ["bench", "--prompts", "/nowhere/at/all"],
        ["speak"],
    ],
)
def test_wrong_usage_is_exit_code_2_and_sends_nothing(service: FakeService, arguments):
    result = run(service, arguments[0], *arguments[1:])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr
    assert not service.requests


def test_a_prompt_file_of_another_encoding(service: FakeService, tmp_path: Path):
    (tmp_path / "p").write_bytes(b"\xff\xfe")
    result = run(service, "generate", "--prompt-file", str(tmp_path / "p"))
    assert result.exit_code == 2


def test_info(service: FakeService):
    text = run(service, "info").stdout
    for line in (
        "health        SERVING (serving)",
        "model         fake (LlamaForCausalLM, float32, KV cache float32)",
        "drafter       ngram, up to 4 draft tokens",
        "drafter       draft-model layers:2, up to 4 draft tokens",
        "drafting      ngram by default, up to 4 draft tokens a step, none from 16 sequences on",
        "worker        rank 0, pid 42, cpu, heartbeat 0.3 s ago",
        "worker        rank 1, pid 43, cpu, no heartbeat yet",
        "pages         100 of 16 tokens: 3 used, 0 cached",
        "speculation   ngram: 6 of 8 draft tokens accepted (75%), acceptance length 4.00",
    ):
        assert line in text.splitlines()
    found = json.loads(run(service, "info", "--json").stdout)
    assert found["health"] == "SERVING"
    assert found["model"]["drafters"][1]["method"] == "draft-model"
    assert found["server"]["state"] == "serving"
    assert found["load"]["speculation"][0]["acceptance_rate"] == 0.75


def test_info_of_a_service_that_is_not_ready(service: FakeService):
    service.script.failures.append(Failure(grpc.StatusCode.UNAVAILABLE, "starting", reason="NOT_SERVING"))
    result = run(service, "info")
    assert result.exit_code == 1
    assert result.stderr == "error: UNAVAILABLE (NOT_SERVING): starting\n"


def test_info_as_a_health_check(service: FakeService):
    assert run(service, "info", "--check").exit_code == 0
    service.set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
    assert run(service, "info").exit_code == 0
    result = run(service, "info", "--check")
    assert (result.exit_code, result.stderr) == (1, "error: UNAVAILABLE: health is NOT_SERVING\n")


def run_admin(service: FakeService, name: str, *arguments: str):
    return CliRunner().invoke(build_app(), ["admin", name, "--server", service.address, *arguments])


def test_admin(service: FakeService):
    result = run_admin(service, "set-speculation", "--method", "ngram", "--max-draft-tokens", "3")
    assert result.stdout == "ngram by default, up to 3 draft tokens a step; from step 17 on\n"
    (change,) = service.changes
    assert (change.method, change.max_draft_tokens) == (NGRAM, 3)
    assert not change.HasField("disable_at_batch_size")
    result = run_admin(service, "set-speculation", "--disable-at-batch-size", "8", "--json")
    assert json.loads(result.stdout) == {
        "method": "ngram",
        "max_draft_tokens": 4,
        "disable_at_batch_size": 8,
        "effective_step": 17,
    }
    assert run_admin(service, "flush-cache").stdout == "5 pages freed\n"
    assert json.loads(run_admin(service, "flush-cache", "--json").stdout) == {"num_freed_pages": 5}


def test_admin_failures(service: FakeService):
    service.script.failures.append(
        Failure(grpc.StatusCode.FAILED_PRECONDITION, "method: mtp is not loaded", "PRECONDITION", "method")
    )
    result = run_admin(service, "set-speculation", "--method", "mtp")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: FAILED_PRECONDITION (PRECONDITION): method: mtp is not loaded\n"
    for wrong in (["--method", "magic"], ["--num-draft-tokens", "0"], ["--disable-at-batch-size", "-1"]):
        assert run_admin(service, "set-speculation", *wrong).exit_code == 2
    assert CliRunner().invoke(build_app(), ["admin", "flush-cache"]).exit_code == 2  # names no server
    assert not service.changes


def test_chat_keeps_the_history(service: FakeService):
    result = run(
        service,
        "chat",
        "--system",
        "s",
        "--max-tokens",
        "3",
        stdin="one\n\ntwo\n/clear\nthree\n/exit\nfour\n",
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == "The\nThe\nThe\n"
    sent = [[turn.content for turn in request.prompt.chat.messages] for request in service.requests]
    assert sent == [["s", "one"], ["s", "one", "The", "two"], ["s", "three"]]


def test_chat_from_a_pipe_ends_at_the_first_failure(service: FakeService):
    service.script.failures.append(Failure(grpc.StatusCode.INTERNAL, "bug"))
    result = run(service, "chat", stdin="one\ntwo\n")
    assert result.exit_code == 1
    assert result.stderr == "error: INTERNAL: bug\n"


def command() -> list[str]:
    return [str(Path(sys.executable).with_name("draftline"))]


def test_the_installed_command_in_a_pipe_has_no_colour(service: FakeService):
    service.script.deltas = [
        ("näh", [Step("näh".encode(), 4, 3, NGRAM)]),
        ("e\x1b[31m", [Step(b"e\x1b[31m")]),
    ]
    done = subprocess.run(
        [*command(), "generate", "--server", service.address, "--prompt", "x", "--show-drafts"],
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "TERM": "xterm-256color"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"n?he\x1b[31m\n"  # a pipe gets the model's bytes as they are
    assert ESCAPE.encode() not in done.stderr


def test_a_service_that_goes_away_is_one_line_too():
    with FakeService() as service:
        service.script.hang_after = 2
        process = subprocess.Popen(
            [*command(), "generate", "--server", service.address, "--prompt", "x"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.read(1) == "T"
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert out == "\n"
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def in_terminal(service: FakeService, arguments: list[str], react) -> tuple[str, int]:
    """Runs the command on a pseudo-terminal; `react(text so far, process)` is called as output comes."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
    for name in ("NO_COLOR", "FORCE_COLOR", "CI"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [*command(), *arguments[:1], "--server", service.address, *arguments[1:]],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
        # A shell gives its background jobs a SIGINT that is ignored, and that is inherited; no terminal does.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    os.close(slave)
    text = ""
    deadline = time.monotonic() + 20
    try:
        while time.monotonic() < deadline:
            if not select.select([master], [], [], 1.0)[0]:
                continue
            try:
                chunk = os.read(master, 4096)
            except OSError:  # the other side is closed
                break
            if not chunk:
                break
            text += chunk.decode()
            react(text, lambda answer: os.write(master, answer), process)
        assert process.poll() is not None or time.monotonic() < deadline, text
        return text, process.wait(10)
    finally:
        os.close(master)
        if process.poll() is None:
            process.kill()
            process.wait()


def test_show_drafts_colours_the_accepted_tokens_on_a_terminal(service: FakeService):
    service.script.deltas = [
        ("a", [Step(b"a")]),
        ("bcd", [Step(b"bcd", 4, 2, NGRAM)]),
        ("\x1b[2Je", [Step(b"\x1b[2Je")]),
    ]
    text, code = in_terminal(service, ["generate", "--prompt", "x", "--show-drafts"], lambda *_: None)
    assert code == 0
    assert re.search(r"a\x1b\[1;32mbc\x1b\[0md", text), repr(text)
    assert "\x1b[2J" not in text  # the model does not steer the terminal
    assert r"\x1b[2Je" in text
    assert "coloured: ngram: bold green" in text


def test_ctrl_c_ends_the_answer_but_not_the_chat(service: FakeService):
    service.script.hang_after = 3
    told = {"stopped": False, "asked": False, "left": False}

    def react(text, write, process):
        if "> " in text and not told["asked"]:
            told["asked"] = True
            write(b"hello\n")
        elif STORY[:5].decode() in text and not told["stopped"]:
            told["stopped"] = True
            process.send_signal(signal.SIGINT)
        elif "(stopped)" in text and text.rstrip(" ").endswith(">") and not told["left"]:
            told["left"] = True
            write(b"/exit\n")

    text, code = in_terminal(service, ["chat"], react)
    assert all(told.values()), text
    assert code == 0
    assert service.cancelled.wait(5)
