"""Schemathesis hooks for scripts/check-api: fill most requests with existing ids, valid tokens and signed webhooks, so that they
get past validation. They also limit the number of live sandboxes, because each uses processes and the quota would refuse
further requests."""

import collections
import hashlib
import hmac
import json
import os
import random
import time
import urllib.error
import urllib.request

import schemathesis

URL, OPERATOR, KEY = (os.environ[f"COBOX_API_{name}"] for name in ["URL", "OPERATOR", "KEY"])
# Without it requests stay unchanged: those that violate the schema on purpose must.
IS_HELPING = os.environ["COBOX_API_HELP"] == "yes"
WEBHOOK = os.environ["COBOX_API_WEBHOOK_SECRET"].encode()
# Below the broker's quota, so that most requests succeed, and enough for requests about an existing sandbox.
KEPT = 4
# Share of the eligible requests that are left unchanged.
LEFT_ALONE = 0.25
# Negotiation fields that a broker without templates and with one provider always refuses.
NARROW = ["template", "provider_preference", "sandbox_id", "sandbox_hint", "preferred_sandbox_id", "token_format", "actor"]
# Box fields that are mostly refused; without them, some boxes get created.
BOX_NARROW = """snapshot_id snapshot snapshot_name template_name vcpus cpu_millicores mem_bytes fs_capacity_bytes run_config env_vars labels
    volumes ttl_seconds mount_config proxy_config access_delegation preserve_memory_on_stop restore_memory tag_value_ids persistent
    idle_ttl_seconds delete_after_stop_seconds timeout""".split()
PATHS = ["v1/healthz", "v1/exec", "v1/files/workspace/a.txt", "v1/fs/list", "v1/shells", "v1/processes", "v1/archive", "execute", "none"]

dice = random.Random(4711)
sandboxes, sessions = collections.OrderedDict(), collections.OrderedDict()
asked_about = None


@schemathesis.hook
def before_call(context, case, kwargs):
    global asked_about
    asked_about = None
    if not IS_HELPING or dice.random() < LEFT_ALONE:
        return
    path, parameters, body = case.path, case.path_parameters, case.body
    while len(sessions) < 2:
        while len(sandboxes) >= KEPT:
            end(sandboxes.popitem(last=False)[0])
        purge_deleted()
        thread = f"thread {dice.randrange(1000)}"
        keep(ask("POST", "/v1/sandbox/sessions", KEY, {"thread_id": thread, "mode": "ensure"}))
    if parameters:
        session = asked_about = dice.choice(list(sessions))
        sandbox, thread, token = sessions[session]
        for name, value in [("id", session), ("session_id", session), ("sandbox_id", sandbox), ("thread_id", thread), ("rest", dice.choice(PATHS))]:
            if name in parameters and "/keys/" not in path:
                parameters[name] = value
        if isinstance(body, dict) and "current_token" in body and dice.random() < 0.5:
            body["current_token"] = token
            body.pop("sandbox_id", None)
    if sandboxes and parameters and "id_or_name" in parameters and case.method != "DELETE":
        parameters["id_or_name"] = dice.choice(list(sandboxes))
    if sandboxes and parameters and "/boxes/{name}" in path and case.method != "DELETE":
        parameters["name"] = dice.choice(list(sandboxes))
    if isinstance(body, dict) and case.method == "POST" and path.endswith("/boxes"):
        for name in BOX_NARROW:
            body.pop(name, None)
    if isinstance(body, dict) and case.method == "POST" and path in ("/v1/sandbox/sessions", "/threads/{thread_id}/sandbox"):
        for name in NARROW + (["scopes"] if body.get("requested_capabilities") is not None or dice.random() < 0.7 else []):
            body.pop(name, None)
        if dice.random() < 0.7:
            body.pop("requested_capabilities", None)
        if path.startswith("/threads"):
            body.pop("thread_id", None)
            body.pop("scope", None)
        elif body.get("scope") is not None:
            body.pop("thread_id", None)
    if path == "/webhooks/threads" and isinstance(body, dict):
        now = str(int(time.time()))
        mac = hmac.new(WEBHOOK, f"{now}.".encode() + json.dumps(body, separators=(", ", ": ")).encode(), hashlib.sha256)
        case.headers.update({"X-Cobox-Timestamp": now, "X-Cobox-Signature": f"v1={mac.hexdigest()}"})


@schemathesis.hook
def after_call(context, case, response):
    is_gone = response.status_code in (404, 410) or case.method == "DELETE"
    if is_gone and "{rest}" not in case.path:
        sessions.pop(asked_about, None)
    if response.status_code >= 300 or case.method == "DELETE":
        return
    try:
        answer = json.loads(response.content or b"null")
    except ValueError:
        return
    if isinstance(answer, dict):
        keep(answer)


def keep(answer):
    nested = answer.get("sandbox")
    sandbox = nested.get("id") if isinstance(nested, dict) else answer.get("sandbox_id") or answer.get("id")
    if not isinstance(sandbox, str) or not sandbox.startswith("sb_"):
        return
    if "session_id" in answer and "token" in answer:
        sessions[answer["session_id"]] = (sandbox, answer["thread_id"], answer["token"])
    sandboxes[sandbox] = True
    sandboxes.move_to_end(sandbox)
    while len(sandboxes) > KEPT:
        end(sandboxes.popitem(last=False)[0])


def end(sandbox):
    for session in [session for session, (of, _, _) in sessions.items() if of == sandbox]:
        del sessions[session]
    delete(sandbox, permanent=dice.random() < 0.5)


def purge_deleted():
    """Deleted sandboxes count against the quota until they expire; those of the other keys would block this one."""
    for deleted in ask("GET", "/v1/sandboxes?deleted=true", OPERATOR)["items"]:
        delete(deleted["id"], permanent=True)


def delete(sandbox, permanent):
    try:
        ask("DELETE", f"/v1/sandboxes/{sandbox}" + ("?permanent=true" if permanent else ""), OPERATOR)
    except urllib.error.HTTPError as refused:
        if refused.code != 404:  # already ended by an earlier response
            raise


def ask(method, path, key, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"Authorization": f"Bearer {key}"}, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read() or b"null")


# Delete the sandboxes of the previous run.
for left in ask("GET", "/v1/sandboxes", OPERATOR)["items"]:
    end(left["id"])
