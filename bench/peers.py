"""The other programs that are measured: each runs on loopback with its own settings and files, and is stopped by its pid.

Use them with `with`. If one is unavailable, `why_not` contains the reason, which the report includes.
"""

import os
import pathlib
import shutil
import socket
import subprocess
import time

START_SECONDS = 30
END_SECONDS = 10
POLL_SECONDS = 0.01
ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOLS = ROOT / "target" / "tools"
# Search path for programs; the same as inside a sandbox.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Peer:
    """A server process, or the reason why it is unavailable."""

    def __init__(self, directory):
        self.directory, self.why_not, self.version, self.processes = pathlib.Path(directory), None, None, []
        self.directory.mkdir(parents=True)
        self.log = self.directory / "log"
        try:
            self.start()
        except (RuntimeError, OSError, subprocess.SubprocessError) as problem:
            self.why_not = " ".join(str(problem).split())
            self.__exit__()

    def run(self, argv, env=None):
        """Starts one of its processes in its own session, so that Ctrl-C only reaches this script."""
        with self.log.open("a") as out:
            process = subprocess.Popen([os.fspath(a) for a in argv], env=env or self.env(), cwd=self.directory, stdin=subprocess.DEVNULL,
                                       stdout=out, stderr=out, start_new_session=True)
        self.processes.append(process)
        return process

    def env(self):
        return {"PATH": PATH, "HOME": str(self.directory), "LANG": "C.UTF-8"}

    def wait_for(self, ready, what):
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            if self.processes[-1].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not start: {self.log.read_text(errors='replace')[-400:]}")
            time.sleep(POLL_SECONDS)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


class OpenSsh(Peer):
    """sshd for the current user, with an empty profile, and one connection shared by all clients."""

    def start(self):
        sshd, ssh = program("sshd"), program("ssh")
        self.version = first_line([ssh, "-V"]).split()[0].rstrip(",")
        empty = self.directory / "home"
        empty.mkdir()
        for key in ("host_key", "user_key"):
            subprocess.run([program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", self.directory / key], check=True)
        self.made = None
        if os.geteuid() == 0 and not os.path.isdir("/run/sshd"):
            os.mkdir("/run/sshd", 0o755)  # sshd's privilege separation directory
            self.made = "/run/sshd"
        port = free_port()
        (self.directory / "sshd_config").write_text(f"""\
ListenAddress 127.0.0.1:{port}
HostKey {self.directory}/host_key
PidFile {self.directory}/sshd.pid
AuthorizedKeysFile {self.directory}/user_key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
UseDNS no
PermitUserRC no
PrintMotd no
PrintLastLog no
SetEnv HOME={empty} BASH_ENV=/dev/null
""")
        self.run([sshd, "-D", "-e", "-f", self.directory / "sshd_config"])
        self.wait_for(lambda: answers(port), "sshd")
        control = self.directory / "mux"
        self.base = [ssh, "-F", "none", "-p", str(port), "-i", str(self.directory / "user_key"), "-o", "IdentitiesOnly=yes",
                     "-o", f"UserKnownHostsFile={self.directory}/known_hosts", "-o", "StrictHostKeyChecking=accept-new", "-o", "LogLevel=ERROR",
                     "-o", "BatchMode=yes"]
        self.shared = ["-S", str(control)]
        self.run([*self.base, *self.shared, "-M", "-N", "127.0.0.1"])
        self.wait_for(control.exists, "the shared ssh connection")

    def command(self, *words):
        return [*self.base, *self.shared, "-T", "127.0.0.1", " ".join(words)]

    def terminal(self, *words):
        """With its own connection: a shared one would use the terminal modes of our pipe, which has none."""
        return [*self.base, "-S", "none", "-tt", "127.0.0.1", " ".join(words)]

    def __exit__(self, *_):
        super().__exit__()
        if getattr(self, "made", None):
            os.rmdir(self.made)


class Nginx(Peer):
    """nginx with its DAV module. It cannot make stored files durable; the second instance does so with a preloaded rename."""

    def __init__(self, directory, storage, is_durable=False):
        self.storage, self.is_durable, self.socket = pathlib.Path(storage), is_durable, pathlib.Path(directory) / "socket"
        super().__init__(directory)

    def start(self):
        nginx = program("nginx")
        said = first_line([nginx, "-V"], whole=True)
        self.version = said.split("nginx/", 1)[1].split()[0]
        if "http_dav_module" not in said:
            raise RuntimeError("this nginx is built without its DAV module")
        port = free_port()
        # On the same file system as the files, so that storing one is a rename and not a copy.
        temp, files = self.storage / "temp", self.storage / "files"
        temp.mkdir(parents=True)
        files.mkdir()
        user = "user root;" if os.geteuid() == 0 else ""
        (self.directory / "nginx.conf").write_text(f"""\
daemon off;
{user}
worker_processes auto;
pid {self.directory}/pid;
error_log stderr warn;
events {{ worker_connections 512; }}
http {{
  access_log off;
  sendfile on;
  keepalive_requests 1000000;
  client_max_body_size 0;
  client_body_buffer_size 1m;
  client_body_temp_path {temp};
  proxy_temp_path {self.directory}/proxy; fastcgi_temp_path {self.directory}/fastcgi;
  uwsgi_temp_path {self.directory}/uwsgi; scgi_temp_path {self.directory}/scgi;
  server {{
    listen 127.0.0.1:{port};
    listen unix:{self.socket};
    root {files};
    location / {{ dav_methods PUT DELETE; create_full_put_path on; }}
  }}
}}
""")
        env = self.env()
        if self.is_durable:
            env["LD_PRELOAD"] = str(durable_rename())
        self.run([nginx, "-p", self.directory, "-c", self.directory / "nginx.conf"], env)
        self.wait_for(lambda: answers(port), "nginx")
        self.address = f"tcp:127.0.0.1:{port}"


class NginxProxy(Peer):
    """nginx as a streaming proxy in front of one UNIX socket: no body is written to disk, and connections are kept alive."""

    def __init__(self, directory, upstream):
        self.upstream = upstream
        super().__init__(directory)

    def start(self):
        nginx = program("nginx")
        self.version = first_line([nginx, "-V"], whole=True).split("nginx/", 1)[1].split()[0]
        port = free_port()
        user = "user root;" if os.geteuid() == 0 else ""
        (self.directory / "nginx.conf").write_text(f"""\
daemon off;
{user}
worker_processes auto;
pid {self.directory}/pid;
error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  keepalive_requests 1000000;
  client_max_body_size 0;
  client_body_temp_path {self.directory}/body; proxy_temp_path {self.directory}/proxy; fastcgi_temp_path {self.directory}/fastcgi;
  uwsgi_temp_path {self.directory}/uwsgi; scgi_temp_path {self.directory}/scgi;
  upstream boxd {{ server unix:{self.upstream}; keepalive 128; }}
  server {{
    listen 127.0.0.1:{port};
    proxy_pass_request_headers on;
    proxy_http_version 1.1;
    proxy_request_buffering off;
    proxy_max_temp_file_size 0;
    proxy_buffers 16 64k;
    proxy_buffer_size 64k;
    proxy_busy_buffers_size 128k;
    location / {{ proxy_pass http://boxd; proxy_set_header Connection ""; proxy_set_header Host boxd; }}
    location ~ /ws$ {{
      proxy_pass http://boxd; proxy_set_header Host boxd;
      proxy_set_header Connection upgrade; proxy_set_header Upgrade $http_upgrade;
    }}
  }}
}}
""")
        self.run([nginx, "-p", self.directory, "-c", self.directory / "nginx.conf"])
        self.wait_for(lambda: answers(port), "nginx")
        self.address = f"tcp:127.0.0.1:{port}"


def durable_rename():
    """Builds the library that makes a renamed file and its directory durable, from the source in this directory."""
    source, library = ROOT / "bench" / "durable_rename.c", TOOLS / "durable_rename.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([program("cc"), "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


class SandboxAgent(Peer):
    def start(self):
        binary = next(iter(TOOLS.glob("sandbox-agent/node_modules/@sandbox-agent/cli-linux-*/bin/sandbox-agent")), None)
        if not binary:
            raise RuntimeError("sandbox-agent is not installed; `scripts/setup bench` does that, by npm")
        self.version = first_line([binary, "--version"]).split()[-1]
        port = free_port()
        self.run([binary, "server", "--no-token", "--no-telemetry", "--host", "127.0.0.1", "--port", str(port)])
        self.wait_for(lambda: answers(port), "sandbox-agent")
        self.address = f"tcp:127.0.0.1:{port}"


class Sshx(Peer):
    """sshx's server, and its client sharing `cat` as the shell."""

    def start(self):
        server, client = TOOLS / "sshx" / "bin" / "sshx-server", TOOLS / "sshx" / "bin" / "sshx"
        if not (server.exists() and client.exists()):
            raise RuntimeError("sshx is not installed; `scripts/setup bench` does that, by cargo")
        self.version = first_line([client, "--version"]).split()[-1]
        port = free_port()
        env = self.env() | {"RUST_LOG": "error"}
        self.run([server, "--listen", "127.0.0.1", "--port", str(port)], env)
        self.wait_for(lambda: answers(port), "sshx-server")
        link = self.directory / "link"
        with link.open("w") as out, self.log.open("a") as err:
            self.processes.append(subprocess.Popen(
                [client, "--quiet", "--server", f"http://127.0.0.1:{port}", "--shell", "/bin/cat"], env=env, cwd=self.directory,
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True))
        self.wait_for(lambda: "#" in link.read_text(), "sshx")
        url, self.key = link.read_text().strip().split("#", 1)
        self.session, self.address = url.rsplit("/", 1)[1], f"tcp:127.0.0.1:{port}"


def program(name):
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{PATH}")
    if not found:
        raise RuntimeError(f"{name} is not installed; `scripts/setup bench` does that")
    return found


def first_line(argv, whole=False):
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    said = (done.stdout + done.stderr).strip()
    return said if whole else said.splitlines()[0]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def answers(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0
