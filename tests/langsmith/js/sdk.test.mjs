// Tests of the unmodified npm SDK against a running broker: boxes, commands with and without `ws`, files, snapshots, and error classes.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { SandboxClient } from "langsmith/sandbox";

const { COBOX_URL: url, COBOX_API_KEY: apiKey } = process.env;
const hasWs = !process.env.COBOX_WITHOUT_WS;
const client = new SandboxClient({ apiEndpoint: `${url}/v2/sandboxes`, apiKey });
let box;

before(async () => {
  box = await client.createSandbox();
});
after(async () => {
  await client.deleteSandbox(box.name);
});

/** Returns the error that a call fails with. */
async function errorOf(call) {
  try {
    await call();
  } catch (error) {
    return error;
  }
  throw new Error("the call did not fail");
}

test("a box is created, found, listed, stopped, started, renamed and deleted", async () => {
  const name = `from-npm-${hasWs}`;
  const made = await client.createSandbox({ name, idleTtlSeconds: 300 });
  assert.equal(made.status, "ready");
  assert.equal((await client.getSandbox(name)).id, made.id);
  assert.equal((await client.getSandbox(made.id)).id, made.id);
  assert.ok((await client.listSandboxes()).some((each) => each.id === made.id));
  await client.stopSandbox(name);
  assert.equal((await client.getSandboxStatus(name)).status, "stopped");
  await client.startSandbox(name);
  assert.equal((await client.getSandboxStatus(name)).status, "ready");
  await client.stopSandbox(name);
  assert.equal((await made.run("echo woken by use")).stdout, "woken by use\n");
  await client.updateSandbox(name, { newName: `${name}-renamed` });
  await client.deleteSandbox(`${name}-renamed`);
  assert.equal((await errorOf(() => client.getSandbox(made.id))).name, "LangSmithResourceNotFoundError");
});

test("a command returns its output and exit code", async () => {
  const result = await box.run("echo out; echo err >&2; exit 3");
  assert.deepEqual([result.stdout, result.stderr, result.exit_code], ["out\n", "err\n", 3]);
  const there = await box.run('echo "$A in $PWD"', { env: { A: "b" }, cwd: "/tmp" });
  assert.equal(there.stdout, "b in /tmp\n");
  const text = await box.run("for i in $(seq 1 20000); do echo 'aä€😀'; done");
  assert.equal(text.stdout, "aä€😀\n".repeat(20000));
});

test("output arrives while the command runs, and input is read", { skip: !hasWs }, async () => {
  const handle = await box.run("echo begun; cat", { wait: false, closeInput: false });
  let received = "";
  for await (const chunk of handle) {
    if (received === "") {
      handle.sendInput("typed ä\n");
      handle.closeInput?.();
    }
    received += chunk.data;
  }
  assert.equal(received, "begun\ntyped ä\n");
  assert.equal((await handle.result).exit_code, 0);
});

test("a command is joined by its id and killed with its children", { skip: !hasWs }, async () => {
  const handle = await box.run("echo begun; sleep 1000", { wait: false });
  const first = await handle[Symbol.asyncIterator]().next();
  assert.equal(first.value.data, "begun\n");
  const joined = await box.reconnect(handle.commandId);
  const again = await joined[Symbol.asyncIterator]().next();
  assert.equal(again.value.data, "begun\n");
  joined.kill();
  assert.equal((await box.run("while pgrep -x sleep > /dev/null; do :; done; echo none")).stdout, "none\n");
});

test("a command over its time limit fails with a timeout", { skip: !hasWs }, async () => {
  assert.equal((await errorOf(() => box.run("sleep 1000", { timeout: 1 }))).name, "LangSmithCommandTimeoutError");
});

test("without ws a command over its time limit reports it", { skip: hasWs }, async () => {
  const late = await box.run("echo begun; sleep 1000", { timeout: 1 });
  assert.equal(late.stdout, "begun\n");
  assert.match(late.stderr, /timeout/);
  assert.notEqual(late.exit_code, 0);
});

test("files are written and read, and a missing file has its own error class", async () => {
  const bytes = Uint8Array.from({ length: 100_000 }, (_, i) => i % 256);
  await box.write("/workspace/deep/er/file.bin", bytes);
  assert.deepEqual(new Uint8Array(await box.read("/workspace/deep/er/file.bin")), bytes);
  await box.write("text ä.txt", "hello");
  assert.equal((await box.run("cat 'text ä.txt'")).stdout, "hello");
  assert.equal((await errorOf(() => box.read("/workspace/none"))).name, "LangSmithResourceNotFoundError");
  assert.match((await errorOf(() => box.read("/workspace"))).message, /is a directory/);
});

test("a box starts from a snapshot of another, by id and by name", async () => {
  const name = `from-npm-${hasWs}`;
  await box.write("/workspace/tree/leaf.txt", "from before");
  const snapshot = await client.captureSnapshot(box.name, name);
  try {
    assert.equal(snapshot.status, "ready");
    await box.write("/workspace/tree/leaf.txt", "changed since");
    assert.equal((await client.getSnapshot(snapshot.id)).name, name);
    assert.ok((await client.listSnapshots({ nameContains: "FROM-npm" })).some((each) => each.id === snapshot.id));
    for (const from of [[snapshot.id], [undefined, { snapshotName: name }]]) {
      const made = await client.createSandbox(...from);
      try {
        assert.equal(new TextDecoder().decode(await made.read("/workspace/tree/leaf.txt")), "from before");
        assert.equal((await made.run("cat tree/leaf.txt")).stdout, "from before");
      } finally {
        await client.deleteSandbox(made.name);
      }
    }
  } finally {
    await client.deleteSnapshot(snapshot.id);
  }
  assert.equal((await errorOf(() => client.createSandbox(snapshot.id))).name, "LangSmithResourceNotFoundError");
});

test("a snapshot of an image needs one the operator provides", async () => {
  const snapshot = await client.createSnapshot(`image-${hasWs}`, "python:3", 1 << 30);
  try {
    assert.equal(snapshot.status, "ready");
    const made = await client.createSandbox(undefined, { snapshotName: `image-${hasWs}:3` });
    assert.equal((await made.run("echo it runs")).stdout, "it runs\n");
    await client.deleteSandbox(made.name);
  } finally {
    await client.deleteSnapshot(snapshot.id);
  }
  assert.equal((await errorOf(() => client.createSnapshot("nothing", "nobody/has:this", 1 << 30))).name, "LangSmithValidationError");
});

test("invalid requests fail with their error class", async () => {
  const invalid = await errorOf(() => client.createSandbox({ name: "no spaces" }));
  assert.equal(invalid.name, "LangSmithValidationError");
  const stranger = new SandboxClient({ apiEndpoint: `${url}/v2/sandboxes`, apiKey: "cbx_nobody", maxRetries: 0 });
  assert.equal((await errorOf(() => stranger.listSandboxes())).name, "LangSmithSandboxAuthenticationError");
});
