// Calls the gateway's gRPC listener with grpc-js: with the messages of tei.proto, and with reflection alone.
// Usage: node call_grpc.mjs, with GRPC, KEY, MODEL and PROTOS (the project's folder) in the environment.
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import { GrpcReflection } from "grpc-js-reflection-client";

const { GRPC, KEY, MODEL, PROTOS } = process.env;
const MANY = 10_000;
const files = ["backends/tei_protos/tei.proto", "backends/tei_protos/tei_multiplexer.proto"];
const options = { includeDirs: [PROTOS], keepCase: true, defaults: true, oneofs: true };
const definitions = grpc.loadPackageDefinition(await loader.load(files, options));
const credentials = grpc.credentials.createInsecure();
const metadata = new grpc.Metadata();
metadata.set("authorization", `Bearer ${KEY}`);
metadata.set("model", MODEL);

function unary(client, method, request, sent = metadata) {
  return new Promise((resolve) => {
    client[method](request, sent, (error, reply) => resolve(error ? { code: error.code, details: error.details } : reply));
  });
}

// Sends all requests; returns the replies and the status.
function stream(call, requests) {
  return new Promise((resolve) => {
    const replies = [];
    call.on("data", (reply) => replies.push(reply));
    call.on("error", (error) => resolve({ replies, code: error.code, details: error.details }));
    call.on("end", () => resolve({ replies, code: 0 }));
    (async () => {
      for (const request of requests) {
        if (!call.write(request)) await new Promise((drained) => call.once("drain", drained));
      }
      call.end();
    })();
  });
}

const tei = definitions.tei.v1;
const embed = new tei.Embed(GRPC, credentials);
const multiplexer = new definitions.tei_multiplexer.v1.TeiMultiplexer(GRPC, credentials);
const numbered = Array.from({ length: MANY }, (_, at) => ({ inputs: `text ${at % 100}` }));
const many = await stream(embed.EmbedStream(metadata), numbered);
const first = many.replies.slice(0, 100).map((reply) => reply.embeddings);
const failed = await stream(embed.EmbedStream(metadata), [{ inputs: "a" }, { inputs: "" }, { inputs: "b" }]);
const target = { instance_name: MODEL };

const reflected = [];
for (const version of ["v1", "v1alpha"]) {
  const client = new GrpcReflection(GRPC, credentials, {}, version);
  const services = (await client.listServices()).map((service) => String(service));
  const descriptor = await client.getDescriptorBySymbol("tei.v1.Embed");
  const found = descriptor.getPackageObject({ keepCase: true, defaults: true });
  const stub = new found.tei.v1.Embed(GRPC, credentials);
  reflected.push({ services, width: (await unary(stub, "Embed", { inputs: "an apple" })).embeddings.length });
}

console.log(JSON.stringify({
  info: await unary(new tei.Info(GRPC, credentials), "Info", {}),
  vector: (await unary(embed, "Embed", { inputs: "an apple" })).embeddings,
  raw: (await unary(embed, "Embed", { inputs: "an apple", normalize: false })).embeddings,
  empty: await unary(embed, "Embed", { inputs: "" }),
  stranger: await unary(embed, "Embed", { inputs: "a" }, new grpc.Metadata()),
  ranks: await unary(new tei.Rerank(GRPC, credentials), "Rerank", { query: "fruit", texts: ["a car", "an apple"] }),
  many: { count: many.replies.length, code: many.code },
  repeated: many.replies.slice(100, 200).every((reply, at) => reply.embeddings.every((number, i) => Math.abs(number - first[at][i]) < 1e-5)),
  failed: { code: failed.code, details: failed.details, count: failed.replies.length },
  multiplexed: (await unary(multiplexer, "Embed", { target, request: { inputs: "an apple" } })).embeddings,
  untargeted: await unary(multiplexer, "Embed", { request: { inputs: "a" } }),
  reflected,
}));
