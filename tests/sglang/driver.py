"""One SGLang engine that does what the tests say. Runs in SGLang's environment.

    python -m tests.sglang.driver FD

Owns the engine. Everything goes through SGLang's own tokenizer manager, as requests over HTTP do;
requests run at the same time and are answered as they end. It must never decide anything: what is
sent, when and how much is the tests' business.
"""

import asyncio
import functools
import multiprocessing
import os
import pkgutil
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from tests.sglang import wire

SCHEDULER_VARIABLE = "TESTS_SCHEDULER"
FLUSH_S = 10.0
"""How long SGLang may wait for its requests to end before it refuses to flush."""


def keep_forking() -> None:
    """Have SGLang's processes forked from this one, which has imported everything already."""
    multiprocessing.set_start_method("fork", force=True)

    def ignored(method: str | None, force: bool = False) -> None:
        """SGLang asks for "spawn"."""

    multiprocessing.set_start_method = ignored


def _do_without_pinned_memory() -> None:
    """SGLang's LoRA code pins host memory on every device, which only a GPU's driver can do."""
    import torch

    for name in ("arange", "empty", "tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self


def _have_torch_native_do_latent_attention() -> None:
    """SGLang has a prompt without a prefix computed from keys in full width, which the one backend
    that a CPU without AMX has cannot: it knows what lies in the pool, which are latent ones."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    def absorbed(*_: Any) -> Any:
        return handlers.AttnForwardMethod.MLA

    handlers.AttentionBackendRegistry.register("torch_native", absorbed)


def _engine_class() -> Any:
    """SGLang's, or one whose scheduler begins in a function named by the environment."""
    from sglang.srt.entrypoints.engine import Engine

    name = os.environ.get(SCHEDULER_VARIABLE)
    if not name:
        return Engine
    entry = staticmethod(pkgutil.resolve_name(name))
    return type("CountedEngine", (Engine,), {"run_scheduler_process_func": entry})


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


def main(start: wire.Start, fd: int) -> None:
    """Make the engine and serve it until told to stop or hung up on."""
    os.environ.update(start.environ)
    sock = socket.socket(fileno=fd)
    try:
        import sglang

        if start.arguments.get("enable_lora"):
            _do_without_pinned_memory()
        _have_torch_native_do_latent_attention()
        engine = _engine_class()(**start.arguments)
    except BaseException:
        wire.send(sock, wire.Failed("", traceback.format_exc()[-4000:]))
        raise
    try:
        engine.loop.run_until_complete(_Serving(engine, sock).run(str(sglang.__version__)))
    finally:
        engine.shutdown()


class _Serving:
    """The commands under way. Everything runs in the engine's own event loop."""

    def __init__(self, engine: Any, sock: socket.socket) -> None:
        self._manager = engine.tokenizer_manager
        self._sock = sock
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, version: str) -> None:
        """Answer commands until the end."""
        loop = asyncio.get_running_loop()
        self._sock.setblocking(False)
        children = tuple(child.pid or 0 for child in multiprocessing.active_children())
        wire.send(self._sock, wire.Up(version, children))
        while packet := await loop.sock_recv(self._sock, wire.BYTES_MAX):
            command = wire.command(packet)
            if isinstance(command, wire.Stop):
                return
            if isinstance(command, wire.Abort):
                self._manager.abort_request(command.id)
                continue
            task = loop.create_task(self._do(command))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _do(self, command: Any) -> None:
        report: wire.Report
        try:
            report = await self._answer(command)
        except Exception as error:  # noqa: BLE001 - whatever SGLang raises is the answer
            report = wire.Failed(command.id, f"{type(error).__name__}: {error}"[:4000])
        await asyncio.get_running_loop().sock_sendall(self._sock, wire.packed(report))

    async def _answer(self, command: Any) -> wire.Report:
        from sglang.srt.managers import io_struct

        if isinstance(command, wire.Generate):
            return await self._generate(command)
        self._manager.auto_create_handle_loop()
        if isinstance(command, wire.Flush):
            flushed = await self._manager.flush_cache(timeout_s=FLUSH_S)
            return wire.Done(command.id, bool(flushed.success))
        if isinstance(command, wire.UpdateWeights):
            update = io_struct.UpdateWeightFromDiskReqInput(model_path=command.path)
            success, text, *_ = await self._manager.update_weights_from_disk(update, None)
            return wire.Done(command.id, bool(success), str(text))
        load = io_struct.LoadLoRAAdapterReqInput(lora_name=command.name, lora_path=command.path)
        loaded = await self._manager.load_lora_adapter(load, None)
        if not loaded.success:
            return wire.Done(command.id, False, str(loaded.error_message))
        adapter = await self._manager.lora_registry.acquire(command.name)
        await self._manager.lora_registry.release(adapter)
        return wire.Done(command.id, True, str(adapter))

    async def _generate(self, command: wire.Generate) -> wire.Output:
        from sglang.srt.managers.io_struct import GenerateReqInput

        given = {"extra_key": command.extra_key, "cache_salt": command.cache_salt,
                 "lora_path": command.lora}  # fmt: skip
        request = GenerateReqInput(
            rid=command.id,
            input_ids=command.tokens,
            sampling_params={"max_new_tokens": command.new, "temperature": 0, "ignore_eos": True},
            stream=command.stream,
            **{name: value for name, value in given.items() if value is not None},
        )
        began, came = time.perf_counter(), list[float]()
        answers = self._manager.generate_request(request, None)
        answer = await anext(answers)
        if command.stream:
            came.append(time.perf_counter() - began)
            async for later in answers:
                answer = later  # each has all tokens so far
                came.append(time.perf_counter() - began)
        about = answer["meta_info"]
        finish = about.get("finish_reason") or {}
        return wire.Output(
            command.id,
            list(answer["output_ids"]),
            int(about.get("cached_tokens") or 0),  # none where it never ran
            about.get("cached_tokens_details"),
            str(finish.get("type", "")),
            tuple(came),
        )


if __name__ == "__main__":
    from tests.sglang.tied import die_with_parent

    die_with_parent()
    os.setsid()
    fd = int(sys.argv[1])
    main(wire.start(socket.socket(fileno=os.dup(fd)).recv(wire.BYTES_MAX)), fd)
