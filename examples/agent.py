#!/usr/bin/env python3
"""A minimal agent: joins a thread's sandbox, writes a file, runs a command, and reads what the human left there.

Standard library only. It finds the broker by --data-dir, otherwise by COBOX_URL and COBOX_API_KEY (or COBOX_API_KEY_FILE),
otherwise by the broker.json of a running `cobox up` in ~/.local/share/cobox, which also names the agent's own key:

python3 examples/agent.py --thread demo
python3 examples/agent.py --thread demo --data-dir /tmp/try
"""

import argparse
import http.client
import json
import os
import pathlib
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

START_DEADLINE_SECONDS = 120  # time limit for a sandbox to start
REQUEST_TIMEOUT_SECONDS = 60
MAX_SHOWN_BYTES = 64 * 1024  # limit for the human's file: enough to read, not enough to flood a terminal

# The broker is often on this machine, where a proxy must not be used.
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Refused(Exception):
    """An error response; the message includes its code, text and request id."""

    def __init__(self, status, code, message, request_id):
        super().__init__(f"{message} ({code}, status {status}, request {request_id})")
        self.status, self.code = status, code


def call(method, url, credential, body=None, content_type="application/json"):
    """One HTTP call; waits and retries while the sandbox is starting (423) or the rate limit is reached (429)."""
    deadline = time.monotonic() + START_DEADLINE_SECONDS
    while True:
        request = urllib.request.Request(url, data=body, method=method)
        request.add_header("Authorization", f"Bearer {credential}")
        if body is not None:
            request.add_header("Content-Type", content_type)
        try:
            with opener.open(request, timeout=REQUEST_TIMEOUT_SECONDS) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            wait = float(error.headers.get("Retry-After") or 1)
            if error.code in (423, 429) and time.monotonic() + wait < deadline:
                time.sleep(wait)
                continue
            raise refused(error) from None


def refused(error):
    try:
        error_body = json.loads(error.read(MAX_SHOWN_BYTES))["error"]
        return Refused(error.code, error_body["code"], error_body["message"], error_body["request_id"])
    except (ValueError, KeyError, TypeError):
        return Refused(error.code, "UNKNOWN", error.reason, error.headers.get("X-Request-Id"))


class Sandbox:
    """The thread's sandbox, reached with the session's short-lived token."""

    def __init__(self, broker_url, api_key, thread):
        request = {
            "thread_id": thread,
            "mode": "ensure",
            "requested_capabilities": ["fs_read", "fs_write", "exec", "shell_observe"],
        }
        url = f"{broker_url.rstrip('/')}/v1/sandbox/sessions"
        response = call("POST", url, api_key, json.dumps(request).encode())
        try:
            session = json.loads(response)
            self.session_id = session["session_id"]
            self.id = session["sandbox"]["id"]
            self.base = session["sandbox"]["http_base_url"]
            self.token = session["token"]
        except (ValueError, KeyError, TypeError):
            sys.exit(f"agent: the server at {broker_url} is not a Cobox broker; check COBOX_URL")

    def write(self, path, data):
        call("PUT", self._file(path), self.token, data, "application/octet-stream")

    def read(self, path):
        return call("GET", self._file(path), self.token)

    def run(self, *argv):
        response = call("POST", f"{self.base}/exec", self.token, json.dumps({"argv": argv}).encode())
        return json.loads(response)

    def _file(self, path):
        return f"{self.base}/files{urllib.parse.quote(path)}"


def find_broker(data_dir):
    """The broker's URL and the API key: from --data-dir, otherwise the environment, otherwise the default data directory of
    `cobox up`."""
    url, key, key_file = (os.environ.get(name) for name in ("COBOX_URL", "COBOX_API_KEY", "COBOX_API_KEY_FILE"))
    if data_dir or not (url or key or key_file):
        url, key, key_file = read_broker_state(pathlib.Path(data_dir).expanduser() if data_dir else default_data_dir())
    if not key and key_file:
        try:
            key = pathlib.Path(key_file).expanduser().read_text()
        except (OSError, ValueError) as error:
            sys.exit(f"agent: can't read the API key: {error}")
    key = (key or "").strip()
    if not url or not key:
        sys.exit("agent: set both COBOX_URL and COBOX_API_KEY (or COBOX_API_KEY_FILE), or neither after `cobox up`")
    if not is_http(url):
        sys.exit(f"agent: {url!r} is not a broker URL; expected a URL such as http://127.0.0.1:8421")
    return url, key


def default_data_dir():
    named = pathlib.Path(os.environ.get("XDG_DATA_HOME") or "")
    return (named if named.is_absolute() else pathlib.Path("~/.local/share").expanduser()) / "cobox"


def read_broker_state(folder):
    """Reads the state file of a running `cobox up`; an agent's own key takes precedence over the user's."""
    try:
        note = json.loads((folder / "broker.json").read_text())
        return note["url"], None, note.get("agent_key_file") or note["api_key_file"]
    except (FileNotFoundError, NotADirectoryError):
        sys.exit(f"agent: no broker is running in {folder}; start one with `cobox up`, or set COBOX_URL and COBOX_API_KEY")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        sys.exit(f"agent: can't read {folder / 'broker.json'}: {error}")


def is_http(url):
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--thread", default=os.environ.get("COBOX_THREAD") or "demo")
    parser.add_argument("--data-dir", help="the data directory of a running `cobox up`")
    options = parser.parse_args()

    url, key = find_broker(options.data_dir)
    sandbox = Sandbox(url, key, options.thread)
    print(f"agent: in sandbox {sandbox.id} of thread {options.thread}")

    sandbox.write("/workspace/from-agent.txt", f"hello from the agent, in {sandbox.session_id}\n".encode())
    print("agent: wrote /workspace/from-agent.txt")

    result = sandbox.run("sh", "-c", "echo \"$(wc -c < from-agent.txt) bytes in $(pwd)\"")
    print(f"agent: ran a command there, exit {result['exit_code']}: {result['stdout'].strip()}")
    if result["exit_code"] != 0:
        sys.exit(f"agent: the command failed: {result['stderr'].strip()}")

    try:
        note = sandbox.read("/workspace/from-human.txt")[:MAX_SHOWN_BYTES].decode(errors="replace")
        print(f"agent: the human left /workspace/from-human.txt:\n{note}", end="" if note.endswith("\n") else "\n")
    except Refused as error:
        if error.code != "FILE_NOT_FOUND":
            raise
        listing = sandbox.run("ls", "-la", "/workspace")["stdout"]
        print(f"agent: the human left no from-human.txt; the shared folder contains:\n{listing}", end="")


if __name__ == "__main__":
    try:
        main()
    except Refused as error:
        sys.exit(f"agent: {error}")
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        sys.exit(f"agent: can't reach the broker: {error}; is it running? `cobox up` starts one")
