// A real issuer for tests. Argument: JSON with the port (0 for any), the addresses of the console, and how long an
// ID token is valid. It prints its own address once it listens; each start makes new keys.
import { createServer } from "node:http";
import { exportJWK, generateKeyPair } from "jose";
import { Provider } from "oidc-provider";

const { port, consoles, idTokenSeconds } = JSON.parse(process.argv[2]);
const GROUPS = { ada: ["admins"], tom: ["search"], eve: ["nobody"] };
const AUDIENCE = "gateway-test";

async function signingKey(algorithm) {
  const { privateKey } = await generateKeyPair(algorithm, { extractable: true });
  return { ...(await exportJWK(privateKey)), use: "sig", alg: algorithm };
}

const server = createServer((request, response) => answer(request, response));
let answer;
server.listen(port, "127.0.0.1", async () => {
  const issuer = `http://127.0.0.1:${server.address().port}`;
  const provider = new Provider(issuer, {
    clients: [
      {
        client_id: "console-test",
        token_endpoint_auth_method: "none",
        grant_types: ["authorization_code"],
        response_types: ["code"],
        redirect_uris: consoles,
        post_logout_redirect_uris: consoles,
      },
      {
        client_id: "indexer",
        client_secret: "a-secret-of-the-issuer-alone",
        grant_types: ["client_credentials"],
        response_types: [],
        redirect_uris: [],
      },
    ],
    jwks: { keys: [await signingKey("RS256"), await signingKey("ES256")] },
    cookies: { keys: ["a-key-for-cookies-of-a-test"] },
    claims: { openid: ["sub", "groups"] },
    conformIdTokenClaims: false,
    findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id, groups: GROUPS[id] ?? [] }) }),
    extraTokenClaims: (_, token) => (token.kind === "ClientCredentials" ? { groups: ["search"] } : undefined),
    ttl: { IdToken: idTokenSeconds, AccessToken: 60, ClientCredentials: 60, Interaction: 600, Session: 3600, Grant: 3600 },
    features: {
      devInteractions: { enabled: true },
      clientCredentials: { enabled: true },
      resourceIndicators: {
        enabled: true,
        defaultResource: () => undefined,
        getResourceServerInfo: () => ({ scope: "embed", audience: AUDIENCE, accessTokenFormat: "jwt" }),
      },
    },
  });
  answer = provider.callback();
  console.log(issuer);
});
