// The page at /docs: the OpenAPI document to read, search and try. Rule: requests go only to the gateway that the page
// came from, and only when a person sends one; only the chosen operation is rendered.
import "../styles/tokens.css";
import "../styles/base.css";
import "../styles/shell.css";
import "../styles/parts.css";
import "../styles/forms.css";
import "./docs.css";
import { render } from "preact";
import { Docs } from "./docs.tsx";

const place = document.getElementById("docs");
if (place) {
  const { files = "", console: ui = "" } = place.dataset;
  // The gateway may be below a path of a proxy.
  const root = new URL(files ? "." : "..", location.href.split("#")[0]);
  render(<Docs address={`${files}openapi.json`} consoleAddress={ui} base={root.href.replace(/\/$/, "")} />, place);
}
