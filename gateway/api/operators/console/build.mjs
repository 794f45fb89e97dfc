// Builds the console and the page at /docs into ../page: page.js, docs.js, their styles, and the licenses of what they
// contain. The first line of each script has the digest of the sources, by which a test sees that it is current.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { join, relative } from "node:path";
import { build } from "esbuild";

const here = import.meta.dirname;
const page = join(here, "..", "page");

// The digest of every source, by path: also computed by tests/deploy/test_console_build.py.
function digestOf(folder) {
  const files = readdirSync(folder, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => relative(here, join(entry.parentPath, entry.name)));
  const hash = createHash("sha256");
  for (const name of ["build.mjs", "package-lock.json", "package.json", "tsconfig.json", ...files].sort()) {
    hash.update(`${name}\0`).update(readFileSync(join(here, name))).update("\0");
  }
  return hash.digest("hex");
}

const digest = digestOf(join(here, "src"));
await build({
  entryPoints: { page: join(here, "src", "main.tsx"), docs: join(here, "src", "docs", "main.tsx") },
  outdir: page,
  bundle: true,
  minify: true,
  format: "iife",
  target: ["chrome111", "firefox114", "safari16.4"],
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  banner: { js: `// Built from ../console; licenses: licenses.txt. Sources: sha256 ${digest}` },
});
const licenses = ["lucide", "preact", "uplot"].map(
  (name) => `${name}\n\n${readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8").trim()}\n`,
);
writeFileSync(join(page, "licenses.txt"), licenses.join("\n----\n\n"));
