// The console at /ui. Rule: it shows what the key may see, and only what the gateway it came from sends.
import "uplot/dist/uPlot.min.css";
import "./styles/tokens.css";
import "./styles/base.css";
import "./styles/shell.css";
import "./styles/parts.css";
import "./styles/forms.css";
import "./styles/tables.css";
import "./styles/charts.css";
import "./styles/models.css";
import "./styles/overview.css";
import "./styles/fleet.css";
import "./styles/tenants.css";
import "./styles/filters.css";
import "./styles/calls.css";
import "./styles/audit.css";
import "./styles/batches.css";
import "./styles/my-key.css";
import "./styles/playground.css";
import { render } from "preact";
import { App } from "./shell/app.tsx";

const place = document.getElementById("console");
if (place) render(<App />, place);
