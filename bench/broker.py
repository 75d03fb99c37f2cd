"""The broker under test: `cobox up` in a temporary directory, and a client with little overhead of its own."""

import http.client
import json
import os
import pathlib
import signal
import subprocess
import time
import urllib.parse

START_SECONDS = 60  # until it responds
END_SECONDS = 60  # until it has suspended its sandboxes
REQUEST_SECONDS = 60
POLL_SECONDS = 0.002


class Broker:
    """Use it with `with`; on exit it is stopped as if by Ctrl-C."""

    def __init__(self, cobox, directory, settings=""):
        self.directory = pathlib.Path(directory)
        self.data_dir = self.directory / "data"
        self.data_dir.mkdir(parents=True)
        if settings:
            (self.data_dir / "config.toml").write_text(settings)
        # Does not read or write the user's files.
        env = {k: v for k, v in os.environ.items() if not k.startswith(("COBOX_", "XDG_")) or k == "COBOX_BOXD"}
        env |= {"HOME": str(self.directory), "XDG_CONFIG_HOME": str(self.directory / "config")}
        self.log = self.directory / "broker.log"
        with self.log.open("w") as out:
            # In its own session: Ctrl-C must only reach this script, which stops the broker after its clients.
            self.process = subprocess.Popen([cobox, "up", "--data-dir", self.data_dir, "--listen", "127.0.0.1:0"], env=env,
                                            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        try:
            note = self._wait_for_note()
        except BaseException:
            self.__exit__()
            raise
        address = urllib.parse.urlsplit(note["url"])
        self.key = pathlib.Path(note["api_key_file"]).read_text().strip()
        self.connection = http.client.HTTPConnection(address.hostname, address.port, timeout=REQUEST_SECONDS)
        self.connection.connect()

    def _wait_for_note(self):
        note, deadline = self.data_dir / "broker.json", time.monotonic() + START_SECONDS
        while not note.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the broker did not start:\n{self.log.read_text(errors='replace')}")
            time.sleep(POLL_SECONDS)
        return json.loads(note.read_text())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def reconnect(self):
        """Call this after a pause: the broker closes idle connections."""
        self.connection.close()
        self.connection.connect()

    def call(self, method, path, credential, body=None):
        """Sends one request over the persistent connection; returns the JSON response."""
        headers = {"Authorization": f"Bearer {credential}", "Content-Type": "application/json"}
        self.connection.request(method, path, body, headers)
        answer = self.connection.getresponse()
        data = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path} returned {answer.status}: {data[:500].decode(errors='replace')}")
        return json.loads(data) if data else None

    def ensure(self, thread):
        return Session(self, self.call("POST", "/v1/sandbox/sessions", self.key, json.dumps({"thread_id": thread, "mode": "ensure"})))


class Session:
    def __init__(self, broker, answer):
        self.broker, self.id, self.sandbox, self.token = broker, answer["session_id"], answer["sandbox"]["id"], answer["token"]
        self.base = urllib.parse.urlsplit(answer["sandbox"]["http_base_url"]).path

    def run_true(self):
        """Runs `true` in the sandbox, through the gateway."""
        result = self.broker.call("POST", f"{self.base}/exec", self.token, '{"argv":["true"]}')
        if result["exit_code"] != 0:
            raise RuntimeError(f"`true` ended with {result['exit_code']} in the sandbox: {result['stderr']}")

    def release(self):
        self.broker.call("DELETE", f"/v1/sandbox/sessions/{self.id}", self.broker.key)

    @property
    def dir(self):
        return self.broker.data_dir / "sandboxes" / self.sandbox

    def boxd(self):
        """The pid of the sandbox's boxd."""
        return json.loads((self.dir / "run.json").read_text())["pid"]

    def crash(self):
        """Kills boxd and with it everything in the sandbox, and waits until the broker has marked it as suspended."""
        os.kill(self.boxd(), signal.SIGKILL)
        deadline = time.monotonic() + END_SECONDS
        while self.broker.call("GET", f"/v1/sandboxes/{self.sandbox}", self.broker.key)["state"] != "suspended":
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.sandbox} was not suspended within {END_SECONDS} s of its crash")
            time.sleep(POLL_SECONDS)
