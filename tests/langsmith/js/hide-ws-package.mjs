// Hides the `ws` package as if it were not installed, so that the SDK runs commands over HTTP.
import { register } from "node:module";

const hook = `
export async function resolve(name, context, next) {
  if (name === "ws") throw Object.assign(new Error("Cannot find package 'ws'"), { code: "ERR_MODULE_NOT_FOUND" });
  return next(name, context);
}`;
register(`data:text/javascript,${encodeURIComponent(hook)}`);
