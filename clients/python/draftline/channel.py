"""Settings of the connection, the same for both clients."""

from __future__ import annotations

from draftline.errors import invalid_field

MAX_MESSAGE_BYTES = 32 * 1024 * 1024


def channel_options(address: str) -> list[tuple[str, int | str]]:
    """gRPC channel arguments for HOST:PORT or unix:PATH. Raises InvalidArgumentError for what is no address.

    gRPC would take a port above 65535 modulo 65536, and so might reach somebody else's service.
    """
    port = address.rpartition(":")[2]
    if not address or (not address.startswith("unix:") and port.isdigit() and int(port) > 65535):
        raise invalid_field("address", f"{address!r} is not HOST:PORT (of 0..65535) or unix:PATH")
    options: list[tuple[str, int | str]] = [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # gRPC's own retries would multiply ours, and they end at the headers, before a token.
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 5_000),
    ]
    if address.startswith("unix:"):
        # A socket's path is no valid :authority for stricter servers and proxies.
        options.append(("grpc.default_authority", "localhost"))
    return options
